"""Layers of settings (defaults, a preset, a recipe, the command line) become one experiment, checked in full."""

import math
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tacit.config.method_tables import chosen_tables, options_of, unknown_option
from tacit.contract.method import Method, Stage
from tacit.core.errors import TacitError, nearest
from tacit.core.paths import invalid_text, user_path
from tacit.core.settings import MOST_SEED, Experiment, explain, flatten, nest, not_a_number, shown
from tacit.core.text import safe
from tacit.methods import find_method
from tacit.nets.weights import PRETRAINED, digest_of, settings_from

SMOKE: dict[str, Any] = {  # what the preset `smoke` of every method shares: seconds on the embedded digits
    "rounds": 2,
    "data.name": "digits",
    "data.clients": 4,
    "data.alpha": 1.0,
    "data.labels": 100,
    "net.name": "cnn-16",
    "net.norm": "gn",
    "train.epochs": 1,
    "train.batch": 32,
    "backend.name": "local",
}


def resolve(*layers: Mapping[str, Any]) -> Experiment:
    """The experiment that layers of settings describe, later ones before earlier ones, checked in full.

    Below them lie the preset of the method and the defaults. Keys may be nested or dotted.

    >>> resolve({"method": {"name": "fedavg"}}, {"train.lr": 0.1, "data.clients": 5}).train.lr
    0.1
    """
    given = as_given(layers)
    method = find_method(str(given.get("method.name", "fedavg")))
    preset = given.get("method.preset", "paper")
    below = preset_settings(method, preset)
    merged = nest({**below, **coming_with_weights({**below, **given}), **given})
    options = {k: v for k, v in merged["method"].items() if k not in ("name", "preset")}
    try:
        experiment = Experiment.model_validate(merged)
        chosen = validated_options(method, options)
    except ValidationError as error:
        raise TacitError(explain(error)) from None
    full = {"name": merged["method"]["name"], "preset": preset, **chosen}
    experiment = with_pretrain_options(experiment.model_copy(update={"method": full}))
    check_together(experiment, method)
    return experiment


def as_given(layers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What the layers say together, with dotted keys, short forms written out, and paths that hold anywhere."""
    flat = [flatten(layer) for layer in layers]
    given: dict[str, Any] = {}
    for layer in flat:
        given.update(layer)
    check_texts(given)
    name = given.get("method", given.get("method.name", "fedavg"))
    given = chosen_tables(flat, name if isinstance(name, str) else "")
    for section in ("method", "data", "net", "server", "backend"):  # `net = "resnet18"` is short for `net.name`
        if isinstance(given.get(section), str):
            given[f"{section}.name"] = given.pop(section)
    if isinstance(given.get("guard"), bool):  # `guard = true`
        given["guard.on"] = given.pop("guard")
    for key in ("method.name", "method.preset", "method"):
        if not isinstance(given.get(key, ""), str):
            raise TacitError(f"{key} = {shown(given[key])} is not a name. `tacit methods` lists methods and presets.")
    return with_whole_paths(given)


def with_whole_paths(given: dict[str, Any]) -> dict[str, Any]:
    """The settings with paths that hold anywhere: a run must find its files from another folder, too."""
    for key in ("method.name", "data.name", "data.split"):
        if isinstance(given.get(key), str) and (path := user_path(given[key], key)).exists() and is_path(given[key]):
            given[key] = str(path.resolve())
    weights = given.get("net.weights", "")
    if isinstance(weights, str) and weights not in ("", PRETRAINED):
        given["net.weights"] = str(user_path(weights, "net.weights").resolve())
    for key in ("data.sites", "data.tests"):
        paths = given.get(key)
        if isinstance(paths, list | tuple) and all(isinstance(path, str) for path in paths):
            given[key] = tuple(str(user_path(path, key).resolve()) for path in paths)
    return given


def coming_with_weights(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What first weights from elsewhere bring with them: the digest of their file, and their size, normalisation, BN.

    Where the file is not here (on another machine than that which begins the run) they bring nothing.
    """
    weights, name = settings.get("net.weights", ""), settings.get("net.name", "cnn")
    if not weights or not isinstance(weights, str) or not isinstance(name, str):
        return {}
    try:
        coming = settings_from(name, weights)
        return {**coming, "net.weights_digest": digest_of(str(coming.get("net.name", name)), weights)}
    except TacitError:  # told by `runs.checks`, before any work
        return {}


def preset_settings(method: type[Method], preset: str) -> dict[str, Any]:
    """What lies below the layers: the method's preset `paper`, and on it the preset that was chosen."""
    if preset not in method.presets:
        known = ", ".join(method.presets)
        hint = nearest(str(preset), method.presets)
        raise TacitError(f"{method.__name__} has no preset '{preset}'.{hint} It has: {known}.")
    below: dict[str, Any] = {"method.name": "fedavg", "method.preset": preset}
    for name in dict.fromkeys(("paper", preset)):
        if name == "smoke":
            below.update(SMOKE)
        for key, value in method.presets.get(name, {}).items():
            below[key if "." in key or key in Experiment.model_fields else f"method.{key}"] = value
    return below


def check_views(experiment: Experiment, method: type[Method]) -> None:
    """Refuse a bank of features where pixels are needed."""
    name = experiment.pretrain.method if experiment.pretrain.on else experiment.method["name"]
    if experiment.pretrain.on or method.needs_pixels:
        raise TacitError(
            f"The method '{name}' needs the images themselves (it turns, draws or distorts them in its own way), and "
            f"net.views = {experiment.net.views} gives it what the frozen part of the net made of them. Write "
            "net.views = 0, or choose another method."
        )


def check_together(experiment: Experiment, method: type[Method]) -> None:
    """Refuse settings of which each is right, but not together."""
    if experiment.data.placement not in method.placements:
        places = " or ".join(f'"{place}"' for place in method.placements)
        raise TacitError(
            f"The method '{experiment.method['name']}' does not work with labels at data.placement = "
            f'"{experiment.data.placement}". It needs {places}: write data.placement = {places}, or choose '
            f"another method (`tacit methods` lists who works where)."
        )
    own = experiment.method.get("server_momentum", 0)
    if own and not experiment.server.takes_the_mean:
        raise TacitError(
            f"method.server_momentum = {shown(own)} and server.name = '{experiment.server.name}' are two ways to make "
            "one step of the global model. Write method.server_momentum = 0, or leave [server] as it is by default."
        )
    asked, quorum = experiment.participation.count(experiment.data.clients), experiment.participation.quorum
    net = experiment.net
    if net.bn == "frozen" and net.norm == "bn" and not net.weights:
        raise TacitError(
            'net.bn = "frozen" keeps the statistics that came with weights, but net.weights is empty: there are none. '
            'Write net.weights = "pretrained" (or a file), or another net.bn.'
        )
    if net.train != "all" and not method.trains_parts:
        raise TacitError(
            f"The method '{experiment.method['name']}' trains all of a net, so net.train = \"{net.train}\" cannot be. "
            'Write net.train = "all", or choose another method.'
        )
    if experiment.train.layer_decay != 1 and (not method.trains_parts or experiment.method.get("scaffold")):
        why = "has control variates for one rate" if method.trains_parts else "trains all of a net alike"
        raise TacitError(
            f"The method '{experiment.method['name']}' {why}, so train.layer_decay = {experiment.train.layer_decay} "
            "cannot be. Write train.layer_decay = 1, or choose another method."
        )
    if net.views:
        check_views(experiment, method)
    if quorum > asked:
        raise TacitError(
            f"participation.quorum is {quorum}, but only {asked} clients are asked in a round: no round could count. "
            f"Write participation.quorum = {asked} or fewer, or ask more clients."
        )


def with_pretrain_options(experiment: Experiment) -> Experiment:
    """The experiment with all options of the method that [pretrain] names, checked and written out.

    >>> resolve({"pretrain": {"method": "fedema", "rounds": 5, "options": {"tau": 0.5}}}).pretrain.options["tau"]
    0.5
    """
    pretrain = experiment.pretrain
    if not pretrain.on:
        return experiment
    options = validated_options(find_method(pretrain.method), pretrain.options, "pretrain.options")
    return experiment.model_copy(update={"pretrain": pretrain.model_copy(update={"options": options})})


def build_pretraining(experiment: Experiment) -> tuple[Stage, ...]:
    """The stage that [pretrain] asks for: what its method has before its classifier, for so many rounds."""
    pretrain = experiment.pretrain
    if not pretrain.on:
        return ()
    method: Method = checker(find_method(pretrain.method)).validate_python(pretrain.options)
    (stage,) = method.before()
    return (Stage("pretrain", stage.method, pretrain.rounds),)


def checker(method: type) -> TypeAdapter[Any]:
    """What checks a method's options and builds it: made once, for that takes longer than to use it a hundred times."""
    if method not in _checkers:
        _checkers[method] = TypeAdapter(method)
    return _checkers[method]


_checkers: dict[type, TypeAdapter[Any]] = {}


def build_method(experiment: Experiment, kind: type[Method] | None = None) -> Method:
    """The method object with its options; `kind` is its class, where that was found before."""
    options = {key: value for key, value in experiment.method.items() if key not in ("name", "preset")}
    built: Method = checker(kind or find_method(experiment.method["name"])).validate_python(options)
    return built


def check_texts(given: Mapping[str, Any]) -> None:
    """Refuse keys and texts that no file and no terminal can hold: control characters, and what is far too long."""
    for key, value in given.items():
        if why := invalid_text(key):
            raise TacitError(f"The setting '{safe(key, 60)}' {why}.")
        for text in value if isinstance(value, list | tuple) else (value,):
            if isinstance(text, str) and (why := invalid_text(text)):
                raise TacitError(f"{key} = {shown(text)} {why}.")


def is_path(name: str) -> bool:
    """Whether a name means a file or folder of the user's, rather than something that tacit knows by name.

    >>> is_path("./sharp.py"), is_path("photos/"), is_path("digits"), is_path("medmnist/bloodmnist")
    (True, True, False, False)
    """
    return name.endswith((".py", ".npz", ".csv", ".tsv", ".parquet", "/")) or name.startswith((".", "/", "~"))


def validated_options(method: type, options: dict[str, Any], where: str = "method") -> dict[str, Any]:
    """All options of a method, checked: those that are given and the defaults of the others."""
    known = options_of(method)
    for key in options:
        if key not in known:
            raise unknown_option(method, key, where)
    hints = typing.get_type_hints(method)
    for key, value in options.items():
        if why := not_a_number(hints[key], value):
            raise TacitError(f"{where}.{key} = {why}, as in {where}.{key} = 1.")
        # An own method may have numbers without bounds, which pydantic takes as they are.
        if isinstance(value, float) and not math.isfinite(value):
            raise TacitError(f"{where}.{key} = {value}: input should be a finite number.")
        if isinstance(value, int) and abs(value) > MOST_SEED:
            raise TacitError(f"{where}.{key} = {shown(value)} is too large: a whole number of TOML has 64 bits.")
    try:
        built: object = checker(method).validate_python(options)
    except ValidationError as error:
        raise TacitError(explain(error, prefix=f"{where}.")) from None
    return {name: getattr(built, name) for name in known}
