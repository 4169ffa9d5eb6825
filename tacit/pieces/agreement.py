"""Other clients' models as advisers: who is like me, how far are we apart, what do we agree on (FedMatch)."""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tacit.pieces.consistency import Debiased, FixedThreshold, Rule
from tacit.pieces.debias import average_prediction, debias
from tacit.pieces.label import PseudoLabels

Ties = Literal["local", "lowest"]


def noise_image(channels: int, size: int, generator: torch.Generator) -> Tensor:
    """One image of Gaussian noise (mean 125, deviation 125, drawn again outside of 0 … 255): uint8 [1, C, S, S].

    >>> image = noise_image(3, 32, torch.Generator().manual_seed(0))
    >>> image.dtype, image.shape, 100 < image.double().mean() < 150
    (torch.uint8, torch.Size([1, 3, 32, 32]), tensor(True))
    """
    values = torch.full((1, channels, size, size), -1.0)
    while bool((outside := (values < 0) | (values > 255)).any()):
        values[outside] = 125 + 125 * torch.randn(int(outside.sum()), generator=generator)
    return values.to(torch.uint8)


def nearest_rows(outputs: Tensor, own: int, count: int) -> list[int]:
    """The rows of `outputs` [M, K] closest to row `own` by Euclidean distance, the closest first, never `own` itself.

    >>> outputs = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.8, 0.2], [0.9, 0.1]])
    >>> nearest_rows(outputs, 0, 2), nearest_rows(outputs, 1, 9)
    ([3, 2], [2, 0, 3])
    """
    distance = (outputs - outputs[own]).square().sum(dim=1)
    distance[own] = torch.inf
    order: list[int] = distance.argsort(stable=True).tolist()
    return order[: min(count, len(outputs) - 1)]


def inter_client_consistency(logits: Tensor, advice: Tensor) -> Tensor:
    """(1/H) Σ_h KL(p_h ‖ p): logits [N, K] of the model that learns, advice [H, N, K] of H helpers; mean over images.

    The helpers are fixed: only the learning model has a gradient. No helper, no loss.

    >>> logits = torch.tensor([[0.5, 0.5], [0.2, 0.8]]).log()
    >>> advice = torch.tensor([[[1.0, 0.0], [0.2, 0.8]]])                       # ln 2 and 0
    >>> inter_client_consistency(logits, advice), inter_client_consistency(logits, advice[:0])
    (tensor(0.3466), tensor(0.))
    """
    if not len(advice):
        return logits.new_zeros(())
    apart = F.kl_div(logits.log_softmax(dim=1).expand_as(advice), advice, reduction="none").sum(dim=2)
    return apart.mean()


def agreed_labels(votes: Tensor, classes: int, ties: Ties = "local") -> Tensor:
    """The class with most votes: int64 [V, N] → [N]. Row 0 is the local model's vote, the others the helpers'.

    Ties go to the local model's class; `lowest`: to the class with the smallest number, as in the public code.

    >>> votes = torch.tensor([[2, 2, 2], [1, 1, 2], [1, 0, 0]])
    >>> agreed_labels(votes, 3), agreed_labels(votes, 3, ties="lowest")
    (tensor([1, 2, 2]), tensor([1, 0, 2]))
    """
    ballots = F.one_hot(votes, classes).to(torch.float32)
    if ties == "local":
        ballots[0] *= 1.5  # more than any other single vote, less than two
    return ballots.sum(dim=0).argmax(dim=1)


def refreshed(memory: dict[str, Tensor], news: dict[str, Tensor], limit: int = 0) -> dict[str, Tensor]:
    """A memory with one row for each client, numbered by its tensor "client": new rows replace that client's old one.

    The latest come last, and only so many stay (0: all).

    >>> memory = {"client": torch.tensor([3, 5]), "x": torch.tensor([0.3, 0.5])}
    >>> news = {"client": torch.tensor([3, 7]), "x": torch.tensor([0.4, 0.7])}
    >>> refreshed(memory, news)
    {'client': tensor([5, 3, 7]), 'x': tensor([0.5000, 0.4000, 0.7000])}
    >>> refreshed(memory, news, limit=1), refreshed({}, news)["client"]
    ({'client': tensor([7]), 'x': tensor([0.7000])}, tensor([3, 7]))
    """
    every = {name: torch.cat([memory[name], rows]) if memory else rows for name, rows in news.items()}
    last = {client: row for row, client in enumerate(every["client"].tolist())}
    rows = sorted(last.values())[-limit if limit else 0 :]
    return {name: tensor[rows] for name, tensor in every.items()}


def helpers_of(client: int, memory: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """The rows of the clients most like this one, by the memory's "output", without its "client" and "output".

    A client that is not in the memory has no helpers yet, and one that is alone in it neither.

    >>> outputs = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]])
    >>> memory = {"client": torch.tensor([5, 3, 7]), "output": outputs, "w": torch.tensor([50.0, 30.0, 70.0])}
    >>> helpers_of(5, memory, 1), helpers_of(4, memory, 1), helpers_of(4, {}, 1)
    ({'w': tensor([70.])}, {}, {})
    """
    known = memory["client"].tolist() if memory else []
    if client not in known or len(known) < 2 or not count:
        return {}
    near = nearest_rows(memory["output"], known.index(client), count)
    return {name: rows[near] for name, rows in memory.items() if name not in ("client", "output")}


class Advice(NamedTuple):
    """By which rule a client believes its own model, and what helpers say of its images."""

    rule: Rule
    probs: Tensor  # [H, N, K]
    votes: Tensor  # int64 [H, N]

    def label(self, which: Tensor, own: Tensor, ties: Ties = "local") -> PseudoLabels:
        """Agreed labels for the images with these numbers; believed where the own model [n, K] is sure enough."""
        label, sure = self.rule.believe(which, own)
        votes = torch.cat([label[None], self.votes[:, which]])
        return PseudoLabels(agreed_labels(votes, own.shape[1], ties), sure)


def advice_of(helpers: Tensor, threshold: float, own: Tensor | None = None) -> Advice:
    """Advice from the helpers' predictions [H, N, K] for all images of a client. H may be 0.

    With the client's `own` predictions [N, K] everybody is debiased (FedDPL): each model's mean prediction is divided
    out before it is believed, or votes. The helpers' probabilities stay as they are.

    >>> own, helper = torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([[0.9, 0.1], [0.7, 0.3]])
    >>> advice_of(helper[None], 0.5).votes, advice_of(helper[None], 0.5, own).votes         # mean 0.8 and 0.2
    (tensor([[0, 0]]), tensor([[0, 1]]))
    """
    rule: Rule = FixedThreshold(threshold)
    believed = helpers
    if own is not None:
        rule = Debiased(rule, average_prediction(own), len(own))
        believed = torch.cat([debias(probs, average_prediction(probs))[None] for probs in helpers] or [helpers])
    return Advice(rule, helpers, believed.argmax(dim=2))
