"""The terminal as tacit writes to it. Whatever is printed on it, only Rich itself can send control codes."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from tacit.core.text import safe_lines


class SafeConsole(Console):
    """A console that shows text as text: no markup, no emoji codes, and control characters as escapes.

    Names come from folders, tables and other machines, so what is printed may hold anything. Colours are given as
    `Text` or `Text.assemble`, never within the text; `[b]` is shown as it is written, also with `markup=True`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"soft_wrap": True, **options, "markup": False, "emoji": False, "highlight": False})

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(safe_lines(text), **{**options, "markup": False, "emoji": False})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):  # the last place: `Text` does not pass `render_str`
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(safe_lines(segment.text), segment.style)


def noted(text: str, word: str = "Note:") -> Text:
    """A line with a yellow word before it."""
    return Text.assemble((word, "yellow"), f" {safe_lines(text)}")
