"""A page made of a few kinds of blocks, written out as Markdown or as HTML that needs nothing else."""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from tacit.core.text import markdown, safe, safe_lines


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    """A paragraph; **bold** and `code` as in Markdown. Names from elsewhere pass through `tacit.core.text.markdown`."""

    text: str


@dataclass(frozen=True)
class Bullets:
    lines: Sequence[str]


@dataclass(frozen=True)
class Table:
    """The first column holds names, the others numbers."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Figure:
    """A picture: a file beside the Markdown, part of the HTML."""

    file: str
    svg: str
    says: str


@dataclass(frozen=True)
class Code:
    text: str


Block = Heading | Text | Bullets | Table | Figure | Code


@dataclass
class Document:
    title: str
    blocks: list[Block] = field(default_factory=list)

    def add(self, *blocks: Block) -> None:
        self.blocks += blocks

    @property
    def pictures(self) -> dict[str, str]:
        """The files that the Markdown refers to."""
        return {block.file: block.svg for block in self.blocks if isinstance(block, Figure)}

    def markdown(self) -> str:
        return "\n\n".join([f"# {markdown(self.title)}", *(_markdown(block) for block in self.blocks)]) + "\n"

    def html(self) -> str:
        body = "\n".join(_html(block) for block in self.blocks)
        title = html.escape(safe(self.title))
        return (
            f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{STYLE}</style>\n</head>\n'
            f"<body>\n<h1>{title}</h1>\n{body}\n</body>\n</html>\n"
        )


STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:46rem;margin:2rem auto;padding:0 1rem;color:#222;"
    "background:#fff}table{border-collapse:collapse;margin:1rem 0}td,th{padding:.2rem .8rem .2rem 0;"
    "border-bottom:1px solid #ddd;text-align:right;font-variant-numeric:tabular-nums}"
    "td:first-child,th:first-child{text-align:left}pre{background:#f5f5f5;padding:.8rem;overflow-x:auto;font-size:.85rem}code{background:#f5f5f5}"
    "svg{max-width:100%;height:auto}"
)


def _markdown(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {text}"
        case Text(text):
            return text
        case Bullets(lines):
            return "\n".join(f"- {line}" for line in lines)
        case Table(head, rows):
            rule = ["---", *("---:" for _ in head[1:])]
            return "\n".join(f"| {' | '.join(map(_cell, row))} |" for row in (head, rule, *rows))
        case Figure(file, _, says):
            return f"![{says}]({file})"
        case Code(text):
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))  # longer than any within
            return f"{fence}\n{safe_lines(text.rstrip())}\n{fence}"


def _cell(text: str) -> str:
    """
    >>> _cell("a|b")
    'a\\\\|b'
    """
    return re.sub(r"(?<!\\)\|", r"\\|", text).replace("\n", " ")


def _html(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"<h{level}>{_inline(text)}</h{level}>"
        case Text(text):
            return f"<p>{_inline(text)}</p>"
        case Bullets(lines):
            return "<ul>" + "".join(f"<li>{_inline(line)}</li>" for line in lines) + "</ul>"
        case Table(head, rows):
            top = "".join(f"<th>{_inline(cell)}</th>" for cell in head)
            rest = "".join("<tr>" + "".join(f"<td>{_inline(cell)}</td>" for cell in row) + "</tr>" for row in rows)
            return f"<table><thead><tr>{top}</tr></thead><tbody>{rest}</tbody></table>"
        case Figure(_, svg, says):
            return f'<figure role="img" aria-label="{html.escape(says)}">{svg}</figure>'
        case Code(text):
            return f"<pre>{html.escape(safe_lines(text))}</pre>"


def _inline(text: str) -> str:
    """
    >>> _inline("**1 < 2** in `x`"), _inline(markdown("**<b>**"))
    ('<strong>1 &lt; 2</strong> in <code>x</code>', '&#42;&#42;&lt;b&gt;&#42;&#42;')
    """
    plain = re.sub(r"\\([\\`*_\[\]|])|\\(?=&)", lambda sign: f"&#{ord(sign[1])};" if sign[1] else "", html.escape(text))
    bold = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", plain)
    return re.sub(r"`(.+?)`", r"<code>\1</code>", bold)
