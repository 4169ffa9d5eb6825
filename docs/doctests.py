"""Shows the doctests of a docstring as code in the API reference (an extension of griffe, see mkdocs.yml)."""

import re
from typing import Any

import griffe


def fenced(text: str) -> str:
    """Each block that begins with >>>, up to the next empty line, as a fenced block of code."""
    block = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", flags=re.MULTILINE | re.DOTALL)
    return block.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```", text)


class Doctests(griffe.Extension):
    """Rewrites the docstring of everything that is documented."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None and not obj.is_alias:
            obj.docstring.value = fenced(obj.docstring.value)
