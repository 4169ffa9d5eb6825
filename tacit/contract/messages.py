"""What goes down to a client, and what comes back."""

from dataclasses import dataclass, field

from torch import Tensor

from tacit.core.payload import Payload, Weights, number_in, tensor_in, weights_in


class _Sent:
    """How to read what was sent, by name, for whoever needs exactly that kind of value."""

    send: Payload

    def weights(self, name: str) -> Weights:
        """The group of tensors with this name."""
        return weights_in(self.send, name)

    def tensor(self, name: str) -> Tensor:
        return tensor_in(self.send, name)

    def number(self, name: str) -> float:
        return number_in(self.send, name)


@dataclass(frozen=True)
class Task(_Sent):
    """What goes down to one client. A client may get several in a round, in different groups; they run in turn.

    >>> import torch
    >>> Task(0, {"model": {"w": torch.zeros(1)}, "thresholds": torch.ones(2)}).tensor("thresholds")
    tensor([1., 1.])
    """

    client: int
    send: Payload
    group: int = 0


@dataclass(frozen=True, kw_only=True)
class Reply(_Sent):
    """What one client made of a task. `send` goes up, and with it `examples` and `metrics`, which are numbers.

    `keep` stays: each name in it replaces what was kept under that name; other names stay as they were.
    """

    send: Payload
    examples: float
    keep: Payload = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    client: int = -1  # filled in by the backend, so that the server knows whose reply it folds
    group: int = 0
    parties: int = 1  # how many clients that learned anything this is the mean of: with secure aggregation all of them
