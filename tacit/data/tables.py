"""Tables of images (.csv, .tsv, .parquet) as text: any separator and encoding. What the columns mean is in
`tacit.data.columns`."""

import codecs
import csv
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tacit.core.errors import TacitError
from tacit.core.text import from_csv_cell, safe
from tacit.data.archives import most_bytes, naming

TABLES = (".csv", ".tsv", ".parquet")
COLUMNS = ("path", "label", "split", "group", "site")  # what a column may mean
SEPARATORS = (",", ";", "\t", "|")
MOST_ROWS = 5_000_000
LONGEST_CELL = 131_072  # characters, as in CSV files

Rows = list[dict[str, str]]


def read_cells(path: Path, wanted: Collection[str] = ()) -> tuple[Rows, list[str]]:
    """The rows of a table, as text by column, and its columns; nothing and null are the empty text.

    Of a Parquet file only the columns `wanted` are read (none: all that hold text or numbers).
    """
    rows: list[dict[str, Any]]
    with naming(path):
        rows, columns = _parquet_rows(path, wanted) if path.suffix.lower() == ".parquet" else _csv_rows(path)
    return [{column: _text(row.get(column)) for column in columns} for row in rows], columns


def table_rows(path: Path, needed: tuple[str, ...] = ("path", "label")) -> Rows:
    """The rows of a table whose columns have the names that tacit gives them."""
    rows, columns = read_cells(path, COLUMNS)
    if missing := [column for column in needed if column not in columns]:
        raise missing_columns(path, columns, missing, needed)
    return rows


def column_names(path: Path) -> list[str]:
    """The columns of a table, without its rows."""
    with naming(path):
        if path.suffix.lower() == ".parquet":
            parquet, _ = _pyarrow()
            return list(parquet.read_schema(path).names)
        encoding = _encoding(path)
        try:
            with open(path, newline="", encoding=encoding, errors="replace") as file:
                return [name for name in next(csv.reader(file, delimiter=_separator(path, encoding)), []) if name]
        except csv.Error as error:
            raise TacitError(f"{path} cannot be read as a table: {error}.") from None


def missing_columns(path: Path, columns: list[str], missing: list[str], needed: Collection[str]) -> TacitError:
    options = " ".join(f"--{name}-column NAME" for name in missing)
    return TacitError(
        f"{path} has the columns {safe(', '.join(columns)) or '(none)'}; {' and '.join(missing)} missing. "
        f"Expected {', '.join(needed)} (and, to learn from, optionally split (train or test), group and site). "
        f"`tacit init` takes columns of other names with {options}."
    )


def _csv_rows(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of a CSV file, without the apostrophes that `tacit.core.text.csv_cell` puts before formulas."""
    first = _encoding(path)
    for encoding in dict.fromkeys((first, "cp1252", "latin-1")):  # Excel's, where it is no Unicode; any byte
        try:
            with open(path, newline="", encoding=encoding) as file:
                reader = csv.DictReader(file, restkey="", delimiter=_separator(path, encoding))
                rows: list[dict[str, Any]] = []
                for row in reader:
                    rows.append({name: from_csv_cell(cell or "") for name, cell in row.items() if name})
                    if len(rows) > MOST_ROWS:
                        raise TacitError(f"{path} has more than {MOST_ROWS:,} rows. Split it.")
                return rows, [name for name in reader.fieldnames or () if name]
        except UnicodeDecodeError:
            if encoding == "latin-1" or first == "utf-16":
                raise
        except csv.Error as error:  # among others a cell of more than 131,072 characters
            raise TacitError(f"{path} cannot be read as a table: {error}.") from None
    raise AssertionError


def _encoding(path: Path) -> str:
    """UTF-16 where the file begins so (or has a zero in every other byte); else UTF-8, with or without its mark, unless
    the beginning tells that it is not."""
    with open(path, "rb") as file:
        head = file.read(1 << 16)
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "utf-16"
    for start, encoding in ((1, "utf-16-le"), (0, "utf-16-be")):
        half = head[start::2]
        if len(half) > 4 and half.count(0) > 0.8 * len(half):
            return encoding
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return "cp1252"
    return "utf-8-sig"


def _separator(path: Path, encoding: str) -> str:
    """The one of , ; tab | that makes most columns of the first line and as many of the second."""
    with open(path, newline="", encoding=encoding, errors="replace") as file:
        lines = [line for _, line in zip(range(2), (file.readline(1 << 20) for _ in range(2)), strict=True) if line]
    best, most = ",", 1
    for separator in SEPARATORS:
        counts = [len(next(csv.reader([line.rstrip("\r\n")], delimiter=separator), [])) for line in lines]
        if counts and counts[0] > most and (separator != "|" or len(set(counts)) == 1):
            best, most = separator, counts[0]
    return best


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise TacitError("Parquet files need pyarrow: pip install 'tacit[tables]'") from None
    return parquet, pyarrow


def _parquet_rows(path: Path, wanted: Collection[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of a Parquet file, of the columns that mean something here.

    Few bytes can promise many long texts, so sizes are looked at before texts are made: what it says of itself, and
    then the distinct texts of each part (`read_dictionary` keeps each of them once).
    """
    parquet, pyarrow = _pyarrow()
    try:
        schema = parquet.read_schema(path)
        columns = list(schema.names)
        used = [name for name in columns if name in wanted] if wanted else [f.name for f in schema if _is_plain(f.type)]
        with parquet.ParquetFile(path, read_dictionary=used) as file:
            about, most = file.metadata, most_bytes(path)
            unpacked = sum(about.row_group(number).total_byte_size for number in range(about.num_row_groups))
            if about.num_rows > MOST_ROWS or unpacked > most:
                raise TacitError(
                    f"{path} promises {about.num_rows:,} rows and {unpacked:,} bytes; at most {MOST_ROWS:,} rows and "
                    f"{most:,} bytes are read from such a file. Split it, or write it without compression."
                )
            rows: list[dict[str, Any]] = []
            for batch in file.iter_batches(batch_size=10_000, columns=used):
                for name in used:
                    if _longest_text(batch.column(name)) > LONGEST_CELL:
                        raise TacitError(f"{path}: a text in column {name} has more than {LONGEST_CELL:,} characters.")
                rows += batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise ValueError(safe(error)) from None
    return rows, columns


def _is_plain(kind: Any) -> bool:
    """Text, numbers, yes and no; not lists, bytes and the like."""
    from pyarrow import types

    if types.is_dictionary(kind):
        return _is_plain(kind.value_type)
    kinds = (types.is_string, types.is_large_string, types.is_integer, types.is_floating, types.is_boolean)
    return any(test(kind) for test in kinds)


def _longest_text(column: Any) -> int:
    """The bytes of the longest text in a column of Arrow's; 0 where it holds something else."""
    from pyarrow import compute, types

    values = column.dictionary if types.is_dictionary(column.type) else column
    is_text = types.is_string(values.type) or types.is_large_string(values.type)
    return (compute.max(compute.binary_length(values)).as_py() or 0) if is_text else 0


def _text(value: Any) -> str:
    """
    >>> _text(None), _text(" cat "), _text(3), _text(3.0), _text(float("nan"))
    ('', 'cat', '3', '3', '')
    """
    if value is None or value != value:  # NaN is how some writers say "nothing"
        return ""
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a column of whole numbers with gaps is stored as fractions
    return str(value).strip()
