"""An experiment on its way to a site: the one form in which it travels, and how a site looks at it.

The server writes it (`for_sites`): nested, complete, without anything that is only true on the server's machine. A site
takes exactly that and nothing else (`experiment_from_wire`). It does not use `resolve`, which is kind to people: no
dotted keys, no short forms, no paths, no presets. What the site will use, written out again, must be what it was sent.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tacit.config.resolve import validated_options, with_pretrain_options
from tacit.contract.method import Method
from tacit.core.errors import TacitError
from tacit.core.settings import INTAKE, Backend, Data, Experiment, explain, flatten
from tacit.core.text import safe
from tacit.methods import MethodFile, find_method, known_methods
from tacit.nets import TIMM_NAME

PLAIN = re.compile(r"[A-Za-z0-9_-]{1,60}")  # no dot, no slash, no letter that only looks like one of these
FILE = re.compile(r"[A-Za-z0-9_-]{1,60}\.py")  # the name of a method file, without its folder
AT_HOME = {"name", "split", *INTAKE}  # of [data]: how the server reads its own files
WORDS = {"method.name": FILE, "net.name": re.compile(TIMM_NAME)}  # what else a word may be, and where
DEEPEST = 4  # the experiment, a section, a list, a list in a list


class Refusal(TacitError):
    """Why a site does not do what it was asked, in words that tell the server nothing about the site's data."""


def for_sites(experiment: Experiment) -> dict[str, Any]:
    """The experiment without what is only true on the server's machine: paths, its backend, its device."""
    settings = experiment.to_dict()
    settings["device"] = "cpu" if experiment.device == "cpu" else "auto"
    settings["title"], settings["tuned"], settings["paper"] = "", "", {}
    settings["net"]["weights_digest"] = ""
    if experiment.net.train == "all":  # the server has them, and sends weights as always; else a site needs them, too
        settings["net"]["weights"] = ""
    settings["data"] |= Data(name="own").model_dump(include=AT_HOME)
    settings["method"] |= {"name": Path(settings["method"]["name"]).name}
    settings["backend"] = Backend(name="flower").model_dump()
    return settings


def method_file(experiment: Experiment) -> MethodFile | None:
    """The file of an experiment's method, where it is one of the user's own."""
    name = str(experiment.method["name"])
    return MethodFile.read(Path(name).expanduser()) if name.endswith(".py") else None


def experiment_from_wire(
    given: Mapping[str, Any], find: Callable[[str], type[Method]]
) -> tuple[Experiment, type[Method]]:
    """The experiment that the server sent and the class of its method, or a `Refusal`.

    `find` gives the class of a method; it is called with a plain name only, when all the rest has been looked at.
    """
    _check_plain(given)
    try:
        experiment = Experiment.model_validate(given)
    except ValidationError as error:
        raise Refusal(f"the experiment does not fit its tacit: {safe(explain(error), 400)}") from None
    name, preset = experiment.method.get("name"), experiment.method.get("preset")
    if not isinstance(name, str) or not isinstance(preset, str):
        raise Refusal("the experiment names no method or no preset")
    method = find(name)
    options = {key: value for key, value in experiment.method.items() if key not in ("name", "preset")}
    try:
        chosen = validated_options(method, options)
        experiment = with_pretrain_options(experiment)
    except TacitError as error:
        raise Refusal(f"the experiment does not fit its tacit: {safe(error, 400)}") from None
    experiment = experiment.model_copy(update={"method": {"name": name, "preset": preset, **chosen}})
    used = for_sites(experiment)
    if _canonical(used) != _canonical(given):
        raise Refusal(f"the experiment is not in the form in which tacit sends it{_where(used, given)}")
    return experiment, method


@dataclass(frozen=True)
class Allowed:
    """A method file that a site's people allow: these bytes, and the class that they define."""

    file: MethodFile
    kind: type[Method]


def allowed_methods(paths: Sequence[Path]) -> dict[str, Allowed]:
    """The method files that a site's people allow, by name, as they are now."""
    found: dict[str, Allowed] = {}
    for path in paths:
        if not FILE.fullmatch(path.name):
            raise TacitError(
                f"The method file {path} cannot be asked for by that name. Expected letters of the English alphabet, "
                "digits, - and _, then .py: rename it, at the server, too."
            )
        if path.name in found:
            raise TacitError(
                f"Two method files have the name {path.name}: {found[path.name].file.path} and {path}. The server asks "
                "for a method by the name of its file, so give one of them."
            )
        file = MethodFile.read(path)
        found[path.name] = Allowed(file, file.load())  # what cannot be loaded says so now, not in the middle of a run
    return found


def find_allowed(name: str, sha256: str, own: Mapping[str, Allowed]) -> type[Method]:
    """The class of a method that the server asks for: one that is installed, or a file that was allowed, unchanged."""
    if name in own:
        _check_same_file(own[name].file, sha256)
        return own[name].kind
    if name in known_methods() and not sha256:
        return find_method(name)
    there = ", ".join([*known_methods(), *own])
    raise Refusal(
        f"it has no method '{safe(name, 60)}' (it has: {there}). Install a tacit that has it, or join with --method"
    )


def _check_same_file(file: MethodFile, sha256: str) -> None:
    name = file.path.name
    if sha256 != file.sha256:
        raise Refusal(
            f"its {name} is not the server's: it has the digest {file.sha256[:16]}…, the server's {sha256[:16]}…. Give "
            "the same file to both, and join again"
        )
    try:
        now = MethodFile.read(file.path).sha256
    except TacitError:
        now = ""
    if now != file.sha256:
        raise Refusal(f"its {name} was changed since it joined: look at the file, and join again to allow it")


def _canonical(settings: Mapping[str, Any]) -> str:
    """One text for one experiment: 1, 1.0 and true differ, and so does the order of the keys."""
    return json.dumps(settings)


def _where(used: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """The first key in which the two differ, for people."""
    one, other = flatten(used), flatten(given)
    for key in [*other, *one]:
        if key not in one or key not in other or json.dumps(one[key]) != json.dumps(other[key]):
            return f" ({safe(key, 60)})"
    return ""


def _check_plain(value: Any, where: str = "", depth: int = 0) -> None:
    """Nothing but numbers and plain words, in tables and lists that are not deep."""
    place = f"'{where}'" if where else "the experiment"
    if depth > DEEPEST:
        raise Refusal(f"{place} is nested too deeply")
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not (isinstance(key, str) and PLAIN.fullmatch(key)):
                raise Refusal(f"{place} has the key '{safe(key, 60)}', which is no plain name")
            _check_plain(inner, f"{where}.{key}" if where else key, depth + 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_plain(inner, where, depth + 1)
    elif isinstance(value, str):
        _check_word(value, where, place)
    else:
        _check_number(value, place)


def _check_word(value: str, where: str, place: str) -> None:
    plain = not value or PLAIN.fullmatch(value) or (where in WORDS and WORDS[where].fullmatch(value))
    if not plain:
        raise Refusal(
            f"{place} is '{safe(value, 60)}', which is no plain name (letters of the English alphabet, digits, "
            "- and _, at most 60): a site takes no paths from elsewhere"
        )


def _check_number(value: object, place: str) -> None:
    if not isinstance(value, bool | int | float):
        raise Refusal(f"{place} is neither a number nor a word")
    if isinstance(value, float) and not math.isfinite(value):
        raise Refusal(f"{place} is {value}, which is no number to work with")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise Refusal(f"{place} is a number beyond 64 bits")
