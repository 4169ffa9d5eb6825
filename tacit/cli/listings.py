"""The commands that tell what there is."""

import dataclasses
import inspect
import sys
import typing
from typing import Any

from rich.table import Table
from rich.text import Text

from tacit.config.resolve import resolve
from tacit.contract.kinds import parse
from tacit.contract.method import PLACEMENTS, Method
from tacit.core.console import SafeConsole
from tacit.core.formatting import size_text
from tacit.core.text import safe, safe_lines
from tacit.methods import find_method, known_methods


def first_sentence(text: str | None) -> str:
    """Up to the first full stop, on one line.

    >>> first_sentence("One thing. Another.")
    'One thing.'
    """
    flat = " ".join((text or "").split())
    return flat.partition(". ")[0].rstrip(".") + "."


def in_a_line(method: type[Method]) -> str:
    """What a method does, from the first line of its file (without its name, which stands beside it)."""
    text = sys.modules[method.__module__].__doc__ or method.__doc__
    flat = first_sentence(text).rstrip(".")
    name, colon, rest = flat.partition(": ")
    return rest if colon and len(name) < 30 else flat


def show_methods(screen: SafeConsole) -> None:
    table = Table(
        "method", "what it does", "server", "clients", "some", "sent up", title="Methods, and where labels are"
    )
    for name in known_methods():
        method = find_method(name)
        marks = ["✓" if place in method.placements else "–" for place in PLACEMENTS]
        table.add_row(name, in_a_line(method), *marks, ", ".join(method.client_sends) or "–")
    screen.print(table)
    screen.print("`tacit methods NAME` tells options, presets, citation, and what travels in bytes.")


def options_of(method: type[Method]) -> list[tuple[str, str, Any, str]]:
    """(name, type, default, help) of every option, as the method file declares them."""
    hints = typing.get_type_hints(method, include_extras=True)
    rows = []
    for option in dataclasses.fields(method):
        hint = hints[option.name]
        notes = [note for note in getattr(hint, "__metadata__", ()) if isinstance(note, str)]
        kind = typing.get_args(hint)[0] if notes else hint
        choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
        text = " | ".join(map(str, choices)) if choices else getattr(kind, "__name__", str(kind))
        rows.append((option.name, text, option.default, " ".join(notes)))
    return rows


def show_method(name: str, settings: dict[str, Any], screen: SafeConsole) -> None:
    method = find_method(name)
    screen.print(Text.assemble((safe(name), "bold"), f"  {safe_lines(in_a_line(method))}\n"))
    screen.print(inspect.getdoc(method) or "")
    screen.print(Text(method.citation, "dim"))
    screen.print(f"Labels may be at: {', '.join(method.placements)}\n")

    table = Table("option", "type", "default", "meaning", title="Options: --set method.OPTION=VALUE")
    for option, kind, default, help_text in options_of(method):
        table.add_row(option, kind, str(default), help_text)
    screen.print(table if table.row_count else "It has no options.")

    presets = Table("preset", "sets", title="Presets: --set method.preset=NAME")
    for preset, values in method.presets.items():
        presets.add_row(preset, ", ".join(f"{k}={v}" for k, v in values.items()) or "the defaults above")
    screen.print(presets)

    experiment = resolve({"data.placement": method.placements[0], "method.name": name}, settings)
    tell_travel(method, experiment, screen)


def tell_travel(method: type[Method], experiment: Any, screen: SafeConsole) -> None:
    """What goes down, what goes up and what stays, in bytes for the chosen net."""
    from tacit import nets
    from tacit.data.federation import load_dataset

    dataset = load_dataset(experiment.data)
    net = nets.build(
        experiment.net.name,
        classes=len(dataset.classes),
        channels=dataset.channels,
        size=dataset.size,
        **experiment.net.model_dump(exclude={"name"}),
    )
    weights = sum(tensor.numel() * tensor.element_size() for tensor in net.state_dict().values())
    title = f"For one client and round, net {experiment.net.name} on {dataset.name} ({len(dataset.classes)} classes)"
    table = Table("", "name", "what", "bytes", title=title)
    ways = {"goes down": method.server_sends, "goes up": method.client_sends, "stays": method.client_keeps}
    for way, things in ways.items():
        for thing, kind in things.items():
            table.add_row(way, thing, kind, size_text(parse(kind).nbytes(weights, len(dataset.classes))))
    screen.print(table)
