"""A model as one file for other programs: ONNX, torch's own format, or safetensors.

All three take uint8 images [batch, C, S, S] that were brought to size by the rule in the file, normalise them
themselves, and give calibrated probabilities. Class names and the rule are inside.
"""

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from tacit.core.errors import TacitError
from tacit.core.payload import write_atomically
from tacit.inference.model import Model

OPSET = 18
ENDINGS = {"onnx": ".onnx", "torch": ".pt2", "safetensors": ".safetensors"}


def export(model: Model, to: str, path: Path) -> None:
    """Write the model in a format of `ENDINGS`."""
    content = {"onnx": onnx_bytes, "torch": torch_bytes, "safetensors": safetensors_bytes}[to](model)
    write_atomically(path, content)


def onnx_bytes(model: Model) -> bytes:
    """Input `images`, output `probabilities`, any batch, opset 18; the description is in the metadata `tacit`."""
    try:
        import onnx
        import onnxscript  # noqa: F401  (torch's exporter is written with it)
    except ImportError:
        raise TacitError("The ONNX export needs two more packages: pip install 'tacit[onnx]'") from None
    with _quiet():
        program = torch.onnx.export(
            model.classifier,
            (_example(model),),
            input_names=["images"],
            output_names=["probabilities"],
            dynamic_shapes={"images": {0: torch.export.Dim("batch")}},
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    proto = program.model_proto
    check_batch(proto)
    onnx.helper.set_model_props(proto, {"tacit": model.description.to_json(), **_short(model)})
    onnx.checker.check_model(proto)
    content: bytes = proto.SerializeToString()
    return content


def check_batch(proto: Any) -> None:
    """A net whose code fixes the batch is exported with the example's, without a word; it must not leave the house."""
    batch = proto.graph.input[0].type.tensor_type.shape.dim[0]
    if not batch.dim_param:
        raise TacitError(
            f"The ONNX export of this net has its batch fixed at {batch.dim_value}, because its code turns the batch "
            "size into a plain number (len(x)). Use x.shape[0] there, or export with --to torch."
        )


def torch_bytes(model: Model) -> bytes:
    """`torch.export.load(path).module()(images)` runs it without tacit; the description is its extra file."""
    with _quiet():
        program = torch.export.export(
            model.classifier, (_example(model),), dynamic_shapes={"images": {0: torch.export.Dim("batch")}}
        )
        file = io.BytesIO()
        torch.export.save(program, file, extra_files={"tacit.json": model.description.to_json()})
    return file.getvalue()


def safetensors_bytes(model: Model) -> bytes:
    """The weights, with the description in the metadata `tacit`; `tacit predict` takes the file, too."""
    tensors = {name: tensor.contiguous() for name, tensor in model.weights.items()}
    return save(tensors, metadata={"tacit": model.description.to_json()})


def _example(model: Model) -> torch.Tensor:
    """Two images: of one, the exporter would think that the batch is always one."""
    size = model.description.size
    return torch.zeros(2, model.description.channels, size, size, dtype=torch.uint8)


def _short(model: Model) -> dict[str, str]:
    """The essentials again, for programs that show metadata as text."""
    return {"classes": "\n".join(model.description.classes), "preprocessing": model.description.rule}


@contextmanager
def _quiet() -> Iterator[None]:
    """torch warns about packages that are not here and about its own insides; none of it is for the user."""
    logger = logging.getLogger("torch")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
