"""Shows the doctests of a docstring as code in the API reference (an extension of griffe, see mkdocs.yml)."""

import re
from typing import Any

import griffe


def fenced(text: str) -> str:
    """Each block that begins with >>>, up to the next empty line, as a fenced block of code."""
    return re.sub(
        r"^>>> .*?(?=\n\s*\n|\Z)", lambda found: f"```pycon\n{found[0].rstrip()}\n```", text, flags=re.M | re.S
    )


class Doctests(griffe.Extension):
    """Rewrites the docstring of everything that is documented."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None and not obj.is_alias:
            obj.docstring.value = fenced(obj.docstring.value)
