"""Options of several methods in one file: `[method.fixmatch]` counts where fixmatch is the method, else it waits.

So a file can be run with another `method.name`, and back, and no line has to be taken out. Nothing in such a table is
ignored unread: its name must be a method's, its options that method's.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tacit.contract.method import Method
from tacit.core.errors import TacitError, nearest
from tacit.methods import find_method, known_methods


def chosen_tables(layers: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Flat layers as one, later ones before earlier ones, with the options of the method that was chosen.

    >>> table = {"method.name": "fixmatch", "method.fixmatch.threshold": 0.9, "rounds": 5}
    >>> chosen_tables([table], "fixmatch")
    {'method.threshold': 0.9, 'method.name': 'fixmatch', 'rounds': 5}
    >>> chosen_tables([table, {"method.name": "fedavg"}], "fedavg")
    {'method.name': 'fedavg', 'rounds': 5}
    """
    own = Path(name).stem if name.endswith(".py") else name
    merged: dict[str, Any] = {}
    for layer in layers:
        plain = {key: value for key, value in layer.items() if _table_of(key) is None}
        for key, value in layer.items():
            if (table := _table_of(key)) is None:
                continue
            option = key.removeprefix(f"method.{table}.")
            if table == own:
                plain = {f"method.{option}": value} | plain  # what stands under [method] itself comes first
            else:
                _check(table, option, own)
        merged |= plain
    return merged


def _table_of(key: str) -> str | None:
    """The method whose table a dotted key stands in.

    >>> _table_of("method.fixmatch.threshold"), _table_of("method.threshold"), _table_of("train.lr")
    ('fixmatch', None, None)
    """
    words = key.split(".")
    return words[1] if words[0] == "method" and len(words) == 3 else None


def _check(table: str, option: str, own: str) -> None:
    """Refuse a table, or an option in it, that belongs to no method: it would wait for ever."""
    names = [*known_methods(), own]
    if table not in names:
        raise TacitError(
            f"[method.{table}]: there is no method '{table}'.{nearest(table, names)} Such a table holds the options of "
            "one method, by its name."
        )
    if option not in (known := options_of(find_method(table))):
        raise TacitError(
            f"[method.{table}]: {table} has no option '{option}'.{nearest(option, known)} It has: "
            f"{', '.join(known) or 'none'}."
        )


def options_of(method: type) -> list[str]:
    return [field.name for field in dataclasses.fields(method)]


def unknown_option(method: type[Method] | type, key: str, where: str = "method") -> TacitError:
    """Why an option cannot be taken, and what to do: whose it is, if it is another method's."""
    known = options_of(method)
    near, has = nearest(key, known), ", ".join(known) or "none"
    owners = [name for name in known_methods() if key in options_of(find_method(name))]
    if near or not owners or where != "method":
        return TacitError(f"{method.__name__} has no option '{where}.{key}'.{near} It has: {has}.")
    whose = "fixmatch" if "fixmatch" in owners else owners[0]
    others = f"{', '.join(owners[:4])}{', …' if len(owners) > 4 else ''}"
    return TacitError(
        f"{method.__name__} has no option 'method.{key}' (it has: {has}). It is an option of: {others}. Take the line "
        f"out; or move it from [method] into a table [method.{whose}], where it counts while {whose} is the method and "
        "waits otherwise."
    )
