"""What the columns of somebody's table mean: by what they were told to, by their names, by what is in them.

Where two columns could be meant, it is asked (`tacit.core.errors.Question`), never guessed.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PureWindowsPath

from tacit.core.errors import Answer, Question, TacitError, nearest
from tacit.core.settings import Data
from tacit.core.text import safe
from tacit.data.images import is_image
from tacit.data.names import is_hidden, is_unlabeled
from tacit.data.tables import COLUMNS, Rows, column_names, missing_columns, read_cells

ONE_HOT = "one-hot"  # the label is the name of the column that holds the 1
LABEL_NAMES = (
    *("labels", "class", "class_name", "classname", "target", "diagnosis", "dx", "category", "y", "ground_truth"),
    *("lesion_type", "label_name", "finding"),
)
SAMPLE = 200  # rows that are looked at to see which column names files
MOST_LABELS = 1000  # distinct values of a column that could be the label


@dataclass
class Table:
    """The rows of a table by meaning (path, label, …), what was chosen, and what should be told about it."""

    path: Path
    rows: Rows
    chosen: dict[str, str]  # column by meaning, where it is not called so
    files: "Files"
    told: list[str] = field(default_factory=list)


def read_table(path: Path, how: Data | None = None, needed: tuple[str, ...] = ("path", "label")) -> Table:
    """A table with its columns understood; an error or a question where they cannot be."""
    how = how or Data()
    files = Files(path.parent)
    names = column_names(path)
    plain = {name for name in names if name.casefold() in COLUMNS}
    asked = {role: _given(path, names, role, how) for role in COLUMNS}
    known = {role: column for role in COLUMNS if (column := asked[role] or _named(path, names, role))}
    whole = all(role in known for role in needed) and ONE_HOT not in known.values()
    cells, columns = read_cells(path, {*plain, *known.values()} if whole else ())
    told = []
    if "path" in needed and "path" not in known:
        known["path"] = _path_column(path, cells, [c for c in columns if c not in known.values()], files, needed)
        told.append(f"paths are taken from the column {safe(known['path'], 60)}, whose cells name files")
    if "label" in needed and "label" not in known:
        known["label"], why = _label_column(path, cells, [c for c in columns if c not in known.values()], needed)
        told.append(why)
    rows = [{role: row.get(column, "") for role, column in known.items()} for row in cells]
    if known.get("label") == ONE_HOT:
        labels = _one_hot_labels(path, cells, [c for c in columns if c not in known.values()])
        rows = [row | {"label": label} for row, label in zip(rows, labels, strict=True)]
    for row in rows:
        row["label"] = "" if is_unlabeled(row.get("label", "")) else row.get("label", "")
    chosen = {f"{role}_column": column for role, column in known.items() if column != role}
    return Table(path, rows, chosen, files, told)


def _given(path: Path, columns: Sequence[str], role: str, how: Data) -> str:
    """The column that the settings name for a meaning; '' where they name none."""
    wanted: str = getattr(how, f"{role}_column")
    if not wanted or (role == "label" and wanted == ONE_HOT) or wanted in columns:
        return wanted
    alike = [column for column in columns if column.strip().casefold() == wanted.strip().casefold()]
    if len(alike) != 1:
        raise TacitError(
            f"{path} has no column '{safe(wanted, 60)}' (data.{role}_column).{nearest(wanted, columns)} "
            f"It has: {safe(', '.join(columns))}."
        )
    return alike[0]


def _named(path: Path, columns: Sequence[str], role: str) -> str:
    """The column that is called what it means, in any case."""
    alike = [column for column in columns if column.strip().casefold() == role]
    if len(alike) > 1 and role not in alike:
        raise _which(path, role, alike, lambda column: "")
    return role if role in alike else (alike or [""])[0]


def _which(path: Path, role: str, columns: Sequence[str], words: Callable[[str], str]) -> Question:
    answers = [
        Answer(words(column) or "this column", f"--{role}-column {_quoted(column)}", {f"{role}_column": column})
        for column in columns
    ]
    return Question(f"{path}: {len(columns)} columns could be the {role}.", answers)


def _quoted(name: str) -> str:
    import shlex

    return shlex.quote(safe(name, 60))


def _path_column(path: Path, cells: Rows, columns: Sequence[str], files: "Files", needed: tuple[str, ...]) -> str:
    """The column whose cells name files."""
    sample = cells[:: max(1, len(cells) // SAMPLE)]
    found: dict[str, list[Path | None]] = {}
    for column in columns:
        filled = [row[column] for row in sample if row.get(column)]
        places = [files.look(cell) for cell in filled]
        if filled and 2 * sum(place is not None for place in places) > len(filled):
            found[column] = places
    if not found:
        raise missing_columns(path, list(cells[0]) if cells else list(columns), ["path"], needed)
    most = max(sum(place is not None for place in places) for places in found.values())
    best = [column for column, places in found.items() if sum(place is not None for place in places) == most]
    if any(found[column] != found[best[0]] for column in best):
        raise _which(path, "path", best, lambda column: f"as in {safe(sample[0][column], 60)}")
    return best[0]


def _label_column(path: Path, cells: Rows, columns: Sequence[str], needed: tuple[str, ...]) -> tuple[str, str]:
    """The column of labels and why it is taken: by a usual name, as columns of 0 and 1, or as the only one possible."""
    by_name = [column for column in columns if column.strip().casefold().replace(" ", "_") in LABEL_NAMES]
    if len(by_name) == 1:
        return by_name[0], f"labels are taken from the column {safe(by_name[0], 60)}, by its name"
    if not by_name and (hot := _one_hot_columns(cells, columns)):
        return ONE_HOT, f"labels are the names of the columns {safe(', '.join(hot))} (one 1 in each row)"
    nearly = [] if by_name else _one_hot_columns(cells, columns, most=0.1)
    left = [column for column in columns if column not in nearly]
    could = by_name or [column for column in left if _could_be_label([row.get(column, "") for row in cells])]
    if nearly and not could:
        _one_hot_labels(path, cells, columns)  # says in which row it is not so
    if not could:
        raise missing_columns(path, list(cells[0]) if cells else list(columns), ["label"], needed)
    if len(could) > 1:
        raise _which(path, "label", could, lambda column: _values([row.get(column, "") for row in cells]))
    return could[0], f"labels are taken from the column {safe(could[0], 60)}, the only one whose values repeat"


def _could_be_label(values: Sequence[str]) -> bool:
    """Few distinct values that come again and again.

    >>> _could_be_label(["mel", "nv", "nv", "mel"]), _could_be_label(["a", "b", "c", "d"]), _could_be_label(["x"] * 9)
    (True, False, False)
    >>> _could_be_label(["0.5", "0.7", "0.5", "0.7"])      # measurements
    False
    """
    distinct = {value for value in values if value}
    filled = sum(bool(value) for value in values)
    if not 2 <= len(distinct) <= min(MOST_LABELS, max(2, filled // 2)):
        return False
    numbers = [value for value in distinct if value.replace(".", "", 1).lstrip("-").isdecimal()]
    return not numbers or (all(value.isdecimal() for value in numbers) and len(numbers) <= 20)


def _values(values: Sequence[str]) -> str:
    counts = Counter(value for value in values if value).most_common(6)
    return ", ".join(f"{safe(value, 30)} {count:,}" for value, count in counts[:5]) + (", …" if len(counts) > 5 else "")


def _hot(cell: str) -> int:
    """1, 0, or -1 for anything else.

    >>> [_hot(cell) for cell in ("1", "1.0", "0", "0.0", "2", "")]
    [1, 1, 0, 0, -1, -1]
    """
    return {"1": 1, "1.0": 1, "0": 0, "0.0": 0}.get(cell, -1)


def _binary_columns(cells: Rows, columns: Sequence[str]) -> list[str]:
    return [c for c in columns if cells and all(_hot(row.get(c, "")) >= 0 or not row.get(c) for row in cells)]


def _one_hot_columns(cells: Rows, columns: Sequence[str], most: float = 0.0) -> list[str]:
    """The columns of 0 and 1, if there are several with exactly one 1 in each row (or nothing at all in it); `most` is
    the share of rows that may be otherwise."""
    hot = [column for column in _binary_columns(cells, columns) if any(row.get(column) for row in cells)]
    wrong = sum(sum(_hot(row[c]) == 1 for c in hot) != 1 and any(row[c] for c in hot) for row in cells)
    return hot if len(hot) > 1 and wrong <= most * len(cells) else []


def _one_hot_labels(path: Path, cells: Rows, columns: Sequence[str]) -> list[str]:
    hot = [column for column in _binary_columns(cells, columns) if any(row.get(column) for row in cells)]
    if len(hot) < 2:
        raise TacitError(f"{path} has no columns of 0 and 1 to take labels from (data.label_column = '{ONE_HOT}').")
    labels = []
    for number, row in enumerate(cells, start=1):
        ones = [column for column in hot if _hot(row[column]) == 1]
        if len(ones) > 1 or (not ones and any(row[column] for column in hot)):
            raise TacitError(
                f"{path}, row {number}: {len(ones)} of the columns {safe(', '.join(hot))} are 1. Expected exactly one "
                "(several labels for one image are not supported)."
            )
        labels.append(ones[0] if ones else "")
    return labels


class Files:
    """Finds the files that the cells of a table name: as paths, as bare names, as ids without an ending."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._names: dict[str, list[Path]] | None = None

    def look(self, cell: str) -> Path | None:
        """The one file that a cell names; None where there is none, or more than one."""
        places = self._places(cell)
        return places[0] if len(places) == 1 else None

    def find(self, cell: str) -> Path:
        """The file that a cell names, or the place where it should be; a ValueError where two have that name."""
        places = self._places(cell)
        if len(places) > 1:
            raise ValueError(f"{len(places)} files have that name, as {' and '.join(_short(p) for p in places[:2])}")
        return places[0] if places else self.folder / cell

    def _places(self, cell: str) -> list[Path]:
        if "\0" in cell or len(cell) > 4096 or not cell:
            return []
        slashed = cell.replace("\\", "/")
        for place in (self.folder / cell, self.folder / slashed, self.folder / "images" / slashed):
            if _is_file(place):
                return [place]
        absolute = slashed.startswith("/") or bool(PureWindowsPath(cell).drive)
        parts = [part for part in slashed.split("/") if part]
        for start in range(1, len(parts) if absolute else 0):  # a path of another machine: what of it is here
            if _is_file(place := self.folder.joinpath(*parts[start:])):
                return [place]
        return self._by_name(parts[-1]) if parts and (absolute or len(parts) == 1) else []

    def _by_name(self, name: str) -> list[Path]:
        """Files of this name, or with this name before their ending, at any depth."""
        if self._names is None:
            self._names = {}
            for path in _images_below(self.folder):
                for key in {path.name, path.stem}:
                    self._names.setdefault(key, []).append(path)
        return self._names.get(name, [])


def _images_below(folder: Path) -> list[Path]:
    import os

    found = []
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not is_hidden(name))
        found += [Path(place, name) for name in sorted(files) if is_image(Path(place, name))]
    return found


def _is_file(path: Path) -> bool:
    try:
        return path.is_file() and is_image(path)
    except OSError:  # a name that no file can have
        return False


def _short(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"
