"""From the records of a run to what can be drawn: numbers by round, vectors by round, matrices by round.

Nothing here knows a method. What a note means is read from its shape and its name: as many numbers as there are
classes, or as clients answered, and so on.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tacit.contract.record import KEYS

MOST_ROUNDS = 600  # points of a line; of more rounds each second, fourth … is shown
MOST_ROWS = 200  # of a heat map
CELLS = 6000  # of a heat map, and of one round of a matrix

Record = Mapping[str, Any]


def describe(name: str) -> dict[str, str]:
    """Title, unit and section of a figure; of one that a method noted, by its name.

    >>> describe("accepted_ratio")["unit"], describe("local_label_accuracy")["section"]
    ('share', 'labels')
    >>> describe("app_u")
    {'title': 'app_u', 'unit': 'number', 'section': 'notes'}
    """
    if name in KEYS:
        key = KEYS[name]
        return {"title": key.title, "unit": key.unit or "number", "section": key.section or "more"}
    by_name = "share" if name.endswith(("accuracy", "_ratio")) else "bytes" if name.endswith("_bytes") else "number"
    section = "labels" if name.endswith("_label_accuracy") else "notes"
    return {"title": name, "unit": by_name, "section": section}


def tidy(value: Any) -> float | int | None:
    """A number short enough to be sent: four significant digits, whole numbers whole, None for NaN and infinity.

    >>> tidy(0.123456), tidy(1167120), tidy(3.0), tidy(float("nan")), tidy(True), tidy("x")
    (0.1235, 1167120, 3, None, 1, None)
    """
    if isinstance(value, bool | int):
        return int(value)
    if not isinstance(value, float) or not math.isfinite(value):
        return None
    return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.4g}")


def stride_for(rounds: int, most: int = MOST_ROUNDS) -> int:
    """Each how many-th round is shown: a power of two, so that runs of different lengths keep rounds in common.

    >>> stride_for(600), stride_for(601), stride_for(5000)
    (1, 2, 16)
    """
    return 1 if rounds <= most else 2 ** math.ceil(math.log2(rounds / most))


def chosen(count: int, most: int) -> list[int]:
    """At most so many of the rounds 0 … count − 1, evenly, the last always among them.

    >>> chosen(5, 10), chosen(10, 3)
    ([0, 1, 2, 3, 4], [0, 4, 9])
    """
    if count <= most:
        return list(range(count))
    if most <= 1:
        return [count - 1]
    return sorted({i * (count - 1) // (most - 1) for i in range(most)})


def read_figures(
    records: Sequence[Record], classes: Sequence[str], cells: int = CELLS, parties: Sequence[str] = ()
) -> dict[str, Any]:
    """All that can be drawn of a run.

    steps, stages, series: one entry a shown round. grids: vectors by round. cubes: matrices by round.
    phases: seconds by phase. left_out: what cannot be drawn, and why. `parties`: the clients' names, if they have any.
    """
    stride = stride_for(len(records))
    shown = [r for i, r in enumerate(records) if i % stride == 0 or i == len(records) - 1]
    found: dict[str, Any] = {
        "steps": [r["step"] for r in shown],
        "stages": _stages(records),
        "stride": stride,
        "series": {},
        "grids": {},
        "cubes": {},
        "phases": _phases(shown),
        "left_out": {},
    }
    count = len(classes) or next((len(r["per_class"]) for r in records if isinstance(r.get("per_class"), list)), 0)
    names = list(dict.fromkeys(name for record in records for name in record if name not in KEYS or KEYS[name].unit))
    for name in names:
        values = [record.get(name) for record in records]
        if name in ("asked", "answered"):
            found["series"][name] = [len(r[name]) if isinstance(r.get(name), list) else None for r in shown]
        elif all(_is_number(value) for value in values):
            series = [tidy(record.get(name)) for record in shown]
            if any(value is not None for value in series):
                found["series"][name] = series
        elif all(value is None or _is_vector(value) for value in values):
            found["grids"][name] = _grid(name, records, classes, count, cells)
        elif all(value is None or _is_matrix(value) for value in values):
            found["cubes"][name] = _cube(name, records, classes, count, cells)
        else:
            found["left_out"][name] = "not a number, a vector or a matrix of one width in every round"
    for name, grid in _by_client(records, cells).items():
        found["grids"][f"client_metrics.{name}"] = grid
    found["grids"] = {name: grid for name, grid in found["grids"].items() if _holds_numbers(grid["values"])}
    found["cubes"] = {name: cube for name, cube in found["cubes"].items() if _holds_numbers(cube["values"])}
    for shape in (*found["grids"].values(), *found["cubes"].values()):
        _call_by_name(shape, parties)
    return found


def _call_by_name(shape: dict[str, Any], parties: Sequence[str]) -> None:
    """Clients by the names of their sites, in place."""
    names = {f"client {number}": name for number, name in enumerate(parties)}
    for axis, heads in (("axis", "rows"), ("across", "columns")):
        if shape.get(axis) in ("client", "party"):
            shape[heads] = [names.get(head, head) for head in shape[heads]]


def events(records: Sequence[Record], most: int = 200, parties: Sequence[str] = ()) -> list[dict[str, Any]]:
    """What went wrong, by round: replies that were refused or cut, rounds that did not count. The newest are kept."""
    names, found = dict(enumerate(parties)), []
    for record in records:
        for one in record.get("refused") or ():
            who = names.get(one["client"], f"client {one['client']}")
            found.append({"step": record["step"], "what": f"{who}: {one['why']}"})
        for one in record.get("clipped") or ():
            who = names.get(one["client"], f"client {one['client']}")
            found.append({"step": record["step"], "what": f"{who}, cut to its bounds: {one['why']}"})
        if record.get("skipped"):
            found.append({"step": record["step"], "what": str(record["skipped"])})
    return found[-most:]


# --- Vectors and matrices ---------------------------------------------------------------------------------


def axis_of(name: str, lengths: Sequence[int], answered: Sequence[int], classes: int) -> str:
    """What the entries of a vector stand for: class, client (those who answered), party (they and the server), place.

    With as many classes as clients the name decides: `client_…` and `party_…` are by client.

    >>> axis_of("thresholds", [10, 10], [4, 4], 10), axis_of("client_weights", [10, 10], [10, 10], 10)
    ('class', 'client')
    >>> axis_of("party_weights", [5, 3], [4, 2], 10), axis_of("moments", [2, 2], [4, 4], 10)
    ('party', 'place')
    """
    says_client = name.split("_")[0] in ("client", "clients", "party")
    by_class = all(length == classes for length in lengths)
    if by_class and not says_client:
        return "class"
    for axis, more in (("client", 0), ("party", 1)):
        if all(length == count + more for length, count in zip(lengths, answered, strict=True)):
            return axis
    return "class" if by_class else "place"


def is_class_list(vectors: Sequence[Sequence[Any]], classes: int) -> bool:
    """Whether vectors name classes: whole numbers, ascending, each a class.

    >>> is_class_list([[], [2, 7]], 10), is_class_list([[2, 2]], 10), is_class_list([[0.5]], 10)
    (True, False, False)
    """
    whole = all(isinstance(v, int) and not isinstance(v, bool) and 0 <= v < classes for vec in vectors for v in vec)
    return whole and all(list(vec) == sorted(set(vec)) for vec in vectors)


def _grid(name: str, records: Sequence[Record], classes: Sequence[str], count: int, cells: int) -> dict[str, Any]:
    """A vector by round, as rows (classes, clients, places) × rounds."""
    there = [record for record in records if isinstance(record.get(name), list)]
    vectors = [record[name] for record in there]
    axis = axis_of(name, [len(v) for v in vectors], [_answered(r) for r in there], count)
    if axis == "place" and is_class_list(vectors, count):
        axis = "class"
        vectors = [[int(number in vector) for number in range(count)] for vector in vectors]
    keys = [_keys(axis, record, vector) for record, vector in zip(there, vectors, strict=True)]
    by_round = [dict(zip(key, vector, strict=True)) for key, vector in zip(keys, vectors, strict=True)]
    return _as_grid([record["step"] for record in there], by_round, axis, classes, cells)


def _as_grid(
    steps: Sequence[int], by_round: Sequence[Mapping[Any, Any]], axis: str, classes: Sequence[str], cells: int
) -> dict[str, Any]:
    rows, all_rows = _rows([tuple(entries) for entries in by_round])
    columns = chosen(len(steps), max(10, cells // max(1, len(rows))))
    return {
        "axis": axis,
        "rows": _names(axis, rows, classes),
        "rows_in_all": all_rows,
        "steps": [steps[i] for i in columns],
        "values": [[tidy(by_round[i].get(row)) for i in columns] for row in rows],
    }


def _cube(name: str, records: Sequence[Record], classes: Sequence[str], count: int, cells: int) -> dict[str, Any]:
    """A matrix by round. Its rows and columns are told apart like those of a vector."""
    there = [record for record in records if isinstance(record.get(name), list)]
    matrices = [record[name] for record in there]
    answered = [_answered(record) for record in there]
    tops: list[list[Any]] = [next((row for row in matrix if row is not None), []) for matrix in matrices]
    widths = [len(top) for top in tops]
    across = "class" if all(width in (0, count) for width in widths) else axis_of(name, widths, answered, count)
    heights = [len(matrix) for matrix in matrices]
    by_client = all(height == number for height, number in zip(heights, answered, strict=True))
    down = "client" if across == "class" and by_client else axis_of(name, heights, answered, count)
    keys = [_keys(down, record, matrix) for record, matrix in zip(there, matrices, strict=True)]
    rows, all_rows = _rows(keys)
    heads = [_keys(across, record, top) if top else [] for record, top in zip(there, tops, strict=True)]
    columns, all_columns = _rows(heads)
    rounds = chosen(len(there), max(2, 8 * cells // max(1, len(rows) * len(columns))))
    values = []
    for i in rounds:
        held = {key: row for key, row in zip(keys[i], matrices[i], strict=True) if row is not None}
        entries = {key: dict(zip(heads[i], row, strict=True)) for key, row in held.items()}
        values.append([[tidy(entries.get(row, {}).get(column)) for column in columns] for row in rows])
    return {
        "axis": down,
        "across": across,
        "rows": _names(down, rows, classes),
        "rows_in_all": all_rows,
        "columns": _names(across, columns, classes),
        "columns_in_all": all_columns,
        "steps": [there[i]["step"] for i in rounds],
        "values": values,
    }


def _by_client(records: Sequence[Record], cells: int) -> dict[str, dict[str, Any]]:
    """What clients told of themselves, as clients × rounds."""
    metrics = [(record["step"], record.get("client_metrics") or {}) for record in records]
    found = {}
    for name in dict.fromkeys(name for _, metrics in metrics for name in metrics):
        there = [(step, {int(k): v for k, v in metrics[name].items()}) for step, metrics in metrics if name in metrics]
        found[name] = _as_grid([step for step, _ in there], [entry for _, entry in there], "client", (), cells)
    return found


def _keys(axis: str, record: Record, entries: Sequence[Any]) -> list[int | str]:
    """Whom or what each entry stands for."""
    if axis == "client":
        return list(record["answered"])
    if axis == "party":
        return [*record["answered"], "server"]
    return list(range(len(entries)))


def _rows(keys: Sequence[Sequence[int | str]]) -> tuple[list[int | str], int]:
    """All keys that occur, in order, the server last; if they are too many, evenly chosen ones and their number."""
    every = sorted({key for some in keys for key in some}, key=lambda key: (isinstance(key, str), key))
    return [every[i] for i in chosen(len(every), MOST_ROWS)], len(every)


def _names(axis: str, keys: Sequence[int | str], classes: Sequence[str]) -> list[str]:
    if axis == "class":
        return [classes[key] if isinstance(key, int) and key < len(classes) else str(key) for key in keys]
    return [f"client {key}" if axis in ("client", "party") and isinstance(key, int) else str(key) for key in keys]


def _answered(record: Record) -> int:
    return len(record.get("answered") or ())


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, int | float)


def _is_vector(value: Any) -> bool:
    return isinstance(value, list) and all(_is_number(entry) for entry in value)


def _is_matrix(value: Any) -> bool:
    """A list of vectors of one width; a client may have none."""
    rows: list[Any] = [row for row in value if row is not None] if isinstance(value, list) else [None]
    return all(_is_vector(row) for row in rows) and len({len(row) for row in rows}) <= 1


def _holds_numbers(values: Any) -> bool:
    return any(map(_holds_numbers, values)) if isinstance(values, list) else values is not None


def _stages(records: Sequence[Record]) -> list[dict[str, Any]]:
    """The stages in order, each with its first step."""
    found: list[dict[str, Any]] = []
    for record in records:
        if not found or found[-1]["name"] != record["stage"]:
            found.append({"name": str(record["stage"]), "first": record["step"]})
    return found


def _phases(shown: Sequence[Record]) -> dict[str, list[float | int | None]]:
    names = dict.fromkeys(name for record in shown for name in record.get("phases") or ())
    return {name: [tidy((record.get("phases") or {}).get(name)) for record in shown] for name in names}
