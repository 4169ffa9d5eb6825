"""Which images would help most if someone labelled them: the smallest margins, balanced over the classes."""

import torch
from torch import Tensor


def margins(probs: Tensor) -> Tensor:
    """By how much the best class leads the second one [N]: small where the model is torn.

    >>> margins(torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]))
    tensor([0.2000, 0.7000])
    """
    best = probs.topk(2, dim=1).values
    return best[:, 0] - best[:, 1]


def worth_labelling(probs: Tensor, known: Tensor, count: int) -> Tensor:
    """The positions of `count` images, the most useful first.

    Always the class that has the fewest labels, counting those that are known [K] and those already on the list, gets
    the next place: its image (by the most probable class) with the smallest margin. Without the balance a list would
    be full of the two classes that are hardest to tell apart.

    Class 1 has no label yet, so its only image comes first; then class 0 by margin:

    >>> probs = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8]])
    >>> worth_labelling(probs, torch.tensor([1, 0]), 2).tolist()
    [2, 1]
    """
    margin, likely = margins(probs), probs.argmax(dim=1)
    waiting = [torch.nonzero(likely == one).flatten() for one in range(probs.shape[1])]
    queues = [positions[margin[positions].argsort(stable=True)].tolist() for positions in waiting]
    have = known.tolist()
    chosen: list[int] = []
    while len(chosen) < count and any(queues):
        one = min((one for one, queue in enumerate(queues) if queue), key=lambda one: (have[one], one))
        chosen.append(queues[one].pop(0))
        have[one] += 1
    return torch.tensor(chosen, dtype=torch.int64)
