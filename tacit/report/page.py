"""The page: one HTML file that holds its style, its script and its data, and asks nobody for anything."""

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tacit.evaluation.headline import headline

FILES = Path(__file__).parent / "static"
SCRIPTS = ("dom.js", "figure.js", "lines.js", "heat.js", "index.js", "run.js", "page.js")  # in the order of need


def build(data: Mapping[str, Any], live: bool = False) -> str:
    """The whole page. A live one asks its server for newer data."""
    style = (FILES / "page.css").read_text()
    parts = "\n".join((FILES / name).read_text() for name in SCRIPTS)
    script = f'(() => {{\n"use strict";\n{parts}}})();\n'
    return fill(
        (FILES / "page.html").read_text(),
        {
            "title": html.escape(title_of(data)),
            "policy": html.escape(policy(style, script)),
            "live": "true" if live else "false",
            "style": style,
            "script": script,
            "data": as_script(data),
            "plain": plain_list(data),
        },
    )


def fill(template: str, parts: Mapping[str, str]) -> str:
    """Put the parts in their places, all at once: what looks like a place inside a part stays as it is.

    >>> fill("<b>{{a}}</b>{{b}}", {"a": "{{b}}", "b": "!"})
    '<b>{{b}}</b>!'
    """
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], template)


def as_script(data: Mapping[str, Any]) -> str:
    """JSON that can stand in a script element: no `<`, so nothing in it can end the element or open a comment.

    >>> as_script({"name": "</script><!--"})
    '{"name":"\\\\u003c/script>\\\\u003c!--"}'
    """
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c")


def policy(style: str, script: str) -> str:
    """What a browser may do for this page: run this script and no other, load nothing from elsewhere."""
    return (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def title_of(data: Mapping[str, Any]) -> str:
    runs = data["runs"]
    return f"{runs[0]['name']} · tacit" if len(runs) == 1 else f"{len(runs)} runs · tacit"


def plain_list(data: Mapping[str, Any]) -> str:
    """The runs as a list, for readers without JavaScript."""
    lines = []
    for run in data["runs"]:
        first = headline(run["results"], 2)
        result = f" {first[0].upper()}{first[1:]} ({run['reporting']})." if first else ""
        lines.append(f"<li>{html.escape(' '.join([run['name'] + ':', run['says'], *run['problems']]) + result)}</li>")
    return "\n".join(lines)
