"""Names from elsewhere are shown, never obeyed: tacit/core/text.py and the console that uses it."""

import csv
import io
import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from tacit.core.console import SafeConsole
from tacit.core.text import FORMULA, csv_cell, from_csv_cell, markdown, safe, safe_lines

HOSTILE = ["[/red]", "[/b]", "\x1b]0;PWN\x07", "\x9b31m", "a\u202eb", "x\u200by", "\r", "\udc80", ":smile:", "\x00"]
anything = st.text(st.characters(exclude_categories=()), max_size=300)  # surrogates, too


def obeyed(text: str) -> list[str]:
    """What a terminal would not show but do."""
    return [sign for sign in text if unicodedata.category(sign) in ("Cc", "Cf", "Cs", "Zl", "Zp") and sign not in "\n"]


@given(anything, st.integers(40, 400))
def test_safe_is_one_bounded_printable_line(text: str, limit: int) -> None:
    shown = safe(text, limit)
    assert shown.isprintable()
    assert len(shown) <= limit
    if text.isprintable() and len(text) <= limit:
        assert shown == text


@given(anything)
def test_safe_lines_keeps_layout_only(text: str) -> None:
    assert not obeyed(safe_lines(text).replace("\t", ""))
    assert safe_lines(text).count("\n") == text.count("\n")


def test_long_text_is_cut_in_the_middle() -> None:
    assert len(safe("\x1b" * 4_000_000)) <= 200
    assert "4,000,000 characters" in safe("x" * 4_000_000)
    assert len(safe_lines("x" * 10**6, 1000)) < 1100
    assert safe_lines("a\nb", 1000) == "a\nb"


@given(anything)
def test_csv_cell_never_begins_a_formula_and_can_be_undone(text: str) -> None:
    cell = csv_cell(text)
    assert isinstance(cell, str)
    assert not cell.startswith(tuple(FORMULA))
    assert from_csv_cell(cell) == text


@given(st.lists(st.text(st.characters(exclude_categories=("Cs",))), min_size=1))
def test_csv_file_is_read_back(names: list[str]) -> None:
    file = io.StringIO()
    csv.writer(file).writerow(map(csv_cell, names))
    (row,) = csv.reader(io.StringIO(file.getvalue(), newline=""))
    assert [from_csv_cell(cell) for cell in row] == names


def test_numbers_in_csv_stay_numbers() -> None:
    assert csv_cell(-0.5) == -0.5
    assert csv_cell(None) is None


def test_markdown_stays_in_its_cell() -> None:
    shown = markdown("a|b\n<script>[x](javascript:1)")
    assert "\n" not in shown
    assert re.search(r"[^\\][<|\[]", shown) is None


def printed(*things: object, **options: object) -> str:
    file = io.StringIO()
    console = SafeConsole(file=file, width=80, **options)
    for thing in things:
        console.print(thing)
    return file.getvalue()


@pytest.mark.parametrize("name", HOSTILE)
def test_whatever_is_printed_the_terminal_obeys_nothing(name: str) -> None:
    table = Table("class", name, title=f"of {name}", caption=name)
    table.add_row(name, Text(name))
    told = printed(name, f"Written to {name}", Text(name), table, [name], {name: name})
    assert not obeyed(told)
    assert safe_lines(name) in told


def test_markup_is_shown_as_written_even_when_asked_for() -> None:
    file = io.StringIO()
    SafeConsole(file=file, width=80, markup=True).print("[/b] [red]x[/red]", markup=True)
    assert file.getvalue() == "[/b] [red]x[/red]\n"


def test_colours_given_as_text_are_kept() -> None:
    told = printed(Text.assemble(("Note:", "yellow"), " \x1b[31m[/b]"), force_terminal=True, color_system="standard")
    assert told == "\x1b[33mNote:\x1b[0m \\x1b[31m[/b]\n"


def test_columns_line_up_when_names_are_escaped() -> None:
    table = Table("class")
    for name in ("cat", "\x1b]0;PWN\x07", "\u202e"):
        table.add_row(name)
    assert len({len(line) for line in printed(table).splitlines()[2:]}) == 1
