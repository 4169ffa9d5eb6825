"""Text from elsewhere (names of classes, files, sites, tensors; what sites send), made harmless for where it is shown.

Names are kept as they are; they are changed only on their way out, and for each medium in one place:

- a sentence, a log line, an error: `safe` (one line, bounded); `safe_lines` where line breaks are layout;
- the terminal: `tacit.core.console.SafeConsole`, which passes everything through `safe_lines` and reads no markup;
- CSV: `csv_text`, whose cells `from_csv_cell` undoes;
- Markdown: `markdown`; HTML: `tacit.card.document` and `tacit.report.page`, which escape it;
- JSON, TOML, Parquet: nothing to do, they have rules of their own, and keep the true names.
"""

import csv
import io
import re
import shlex
from collections.abc import Iterable

LONG = 200  # characters of a name or of a stranger's sentence that are shown
# What Markdown takes for more than a letter: marks of style, of links and cells, and what begins a tag or an entity.
MARKS = re.compile(r"[\\`*\[\]|]|(?<![^\W_])_|_(?![^\W_])|<(?=[A-Za-z/!?])|&(?=#?\w+;)")
FORMULA = "=+-@\t\r\n＝＋－＠"  # a spreadsheet may run a cell that begins with one of these


def safe(text: object, limit: int = LONG) -> str:
    r"""One line of printable text: controls, direction marks and invisible characters are shown as escapes, and what
    is too long loses its middle.

    >>> safe("cat"), safe("a\x1b]0;PWN\x07"), safe("abc\u202etxt.exe"), safe("two\nlines")
    ('cat', 'a\\x1b]0;PWN\\x07', 'abc\\u202etxt.exe', 'two\\nlines')
    >>> safe("w" * 4_000_000, 60)
    'wwwwwwwwwwwwwwwwww…(4,000,000 characters)…wwwwwwwwwwwwwwwwww'
    """
    whole = str(text)
    if len(whole) <= limit and len(shown := _escaped(whole, "")) <= limit:
        return shown
    left_out = f"…({len(whole):,} characters)…"
    side = max((limit - len(left_out)) // 2, 4)
    return _escaped(whole[:side], "")[:side] + left_out + _escaped(whole[-side:], "")[-side:]


def safe_lines(text: object, limit: int | None = None) -> str:
    r"""The same for text in which line breaks and tabs are layout; unbounded unless a limit is given.

    >>> safe_lines("a table\n\tof \x1b[31mnames\r\n")
    'a table\n\tof \\x1b[31mnames\\r\n'
    """
    whole = str(text)
    if limit is not None and len(whole) > limit:
        whole = f"{whole[: limit // 2]}\n…({len(whole):,} characters)…\n{whole[len(whole) - limit // 2 :]}"
    return _escaped(whole, "\n\t")


def _escaped(text: str, layout: str) -> str:
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() or sign in layout else ascii(sign)[1:-1] for sign in text)


def csv_cell(value: object) -> object:
    """A value for a CSV file: text that a spreadsheet would take for a formula gets an apostrophe in front.

    >>> csv_cell("cat"), csv_cell("=cmd|' /C calc'!A0"), csv_cell(-0.5), csv_cell("'=1")
    ('cat', "'=cmd|' /C calc'!A0", -0.5, "''=1")
    """
    return f"'{value}" if isinstance(value, str) and _may_run(value) else value


def from_csv_cell(cell: str) -> str:
    """The text that `csv_cell` was given.

    >>> from_csv_cell("'=1"), from_csv_cell("''=1"), from_csv_cell("'tis"), from_csv_cell("-1")
    ('=1', "'=1", "'tis", '-1')
    """
    return cell[1:] if cell.startswith("'") and _may_run(cell) else cell


def _may_run(text: str) -> bool:
    """Whether it begins like a formula; spaces and apostrophes before that are no protection (and apostrophes are
    looked through so that what `csv_cell` adds can be taken off again)."""
    return text.lstrip(" '").startswith(tuple(FORMULA))


def markdown(text: object, limit: int = LONG) -> str:
    r"""Text within a line or a cell of Markdown: nothing in it is taken for a tag, a link, a style or the cell's end.

    >>> print(markdown("<b>[x](http://y) | `z` *a_b* p < .01"))
    \<b>\[x\](http://y) \| \`z\` \*a_b\* p < .01
    """
    return MARKS.sub(r"\\\g<0>", safe(text, limit))


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """A CSV file (RFC 4180), the first row its heading; what is in it can be undone with `from_csv_cell`."""
    file = io.StringIO()
    csv.writer(file).writerows(map(csv_cell, row) for row in rows)  # with \r\n, so that \r within a cell is quoted
    return file.getvalue()


def as_bytes(text: str) -> bytes:
    """UTF-8; names of files that are not UTF-8 get back the bytes that they have on the disk."""
    return text.encode("utf-8", "surrogateescape")


def as_word(path: object) -> str:
    """A path as one word of a command that can be copied into a shell.

    >>> as_word("runs/mine"), as_word("my runs/first")
    ('runs/mine', "'my runs/first'")
    """
    return shlex.quote(str(path))
