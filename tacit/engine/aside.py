"""What the engine keeps in the server's state beside the method: the memory of the server's optimiser, earlier answers,
the best answer, the norms of recent updates, the secret of the noise.

It has names that begin with `tacit:`. They are taken out of the state before a method sees it and put back afterwards;
so all of it is checkpointed, resumed and gone back to as the state is.
"""

import secrets
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tacit.core.errors import TacitError
from tacit.core.payload import Payload, Weights, number_in, tensor_in, weights_in
from tacit.core.settings import Server
from tacit.pieces.aggregate import weighted_mean
from tacit.pieces.server_optimizer import Memory

MARK = "tacit:"
OPTIMIZER, ANSWER, BEST = f"{MARK}optimizer:", f"{MARK}answer", f"{MARK}best"
NORMS, SECRET = f"{MARK}norms:", f"{MARK}secret"


def methods_part(state: Payload) -> Payload:
    """The state as a method knows it; the very same object where nothing lies beside it.

    >>> methods_part({"model": {}, "tacit:answer": {}})
    {'model': {}}
    """
    if not any(name.startswith(MARK) for name in state):
        return state
    return {name: value for name, value in state.items() if not name.startswith(MARK)}


def check_names(state: Payload) -> None:
    """Refuse a method's state in which a name of the engine's stands."""
    for name in state:
        if isinstance(name, str) and name.startswith(MARK):
            raise TacitError(
                f"The method's state has the name '{name}'. Names that begin with '{MARK}' are the engine's: choose "
                "another one in server_start and server_merge."
            )


# --- The memory of the server's optimiser ----------------------------------------------------------------------------


def memory_in(state: Payload) -> dict[str, Memory]:
    """What the server's optimiser remembers, by what is averaged.

    >>> memory_in({"model": {}, "tacit:optimizer:velocity:model": {}})
    {'model': {'velocity': {}}}
    """
    memory: dict[str, Memory] = {}
    for name in state:
        if name.startswith(OPTIMIZER):
            kind, _, what = name.removeprefix(OPTIMIZER).partition(":")
            memory.setdefault(what, {})[kind] = weights_in(state, name)
    return memory


def with_memory(merged: Payload, before: Payload, memory: Mapping[str, Memory]) -> Payload:
    """A merged state with what the optimiser now remembers, and with what lay beside the state before.

    >>> with_memory({"model": {}}, {"tacit:answer": {}}, {"model": {"velocity": {}}})
    {'model': {}, 'tacit:answer': {}, 'tacit:optimizer:velocity:model': {}}
    """
    beside = {name: value for name, value in before.items() if name.startswith(MARK)}
    new: Payload = {f"{OPTIMIZER}{kind}:{what}": m for what, kinds in memory.items() for kind, m in kinds.items()}
    return {**merged, **beside, **new} if beside or new else merged


# --- The answer: the last round's, or an average over rounds ---------------------------------------------------------


def with_answer(settings: Server, state: Payload, answer: Weights | None) -> Payload:
    """The state with this round's answer taken in, as `server.answer` wants it (None: there is no model yet).

    >>> import torch
    >>> settings, state = Server(answer="mean", answer_rounds=2), {}
    >>> for value in (1.0, 3.0, 7.0):
    ...     state = with_answer(settings, state, {"w": torch.tensor(value)})
    >>> list(state), averaged_answer(state)
    (['tacit:answer:0', 'tacit:answer:1'], {'w': tensor(5.)})
    >>> settings, state = Server(answer="ema", answer_decay=0.5), {}
    >>> for value in (1.0, 4.0, 7.0):                                           # (1 · ¼ + 4 · ½ + 7) / 1¾
    ...     state = with_answer(settings, state, {"w": torch.tensor(value)})
    >>> averaged_answer(state)
    {'w': tensor(5.2857)}
    """
    if answer is None or settings.answer == "last":
        return state
    others: Payload = {name: value for name, value in state.items() if not name.startswith(ANSWER)}
    if settings.answer == "mean":
        window = [*_window(state), answer][-settings.answer_rounds :]
        return {**others, **{f"{ANSWER}:{place}": weights for place, weights in enumerate(window)}}
    rounds = int(number_in(state, f"{ANSWER}s")) + 1 if f"{ANSWER}s" in state else 1
    share = newest_share(settings.answer_decay, rounds)
    before = weights_in(state, ANSWER) if rounds > 1 else answer
    return {**others, ANSWER: weighted_mean([before, answer], [1.0 - share, share]), f"{ANSWER}s": rounds}


def newest_share(decay: float, rounds: int) -> float:
    """The share of the newest of so many rounds, where each counts `decay` times as much as the next: (1−d) / (1−dⁿ).

    >>> newest_share(0.5, 1), newest_share(0.5, 2), newest_share(0.0, 9)        # 1; 1 of ½ + 1; the last one alone
    (1.0, 0.6666666666666666, 1.0)
    """
    return (1.0 - decay) / (1.0 - decay**rounds)


def averaged_answer(state: Payload) -> Weights | None:
    """The average over rounds that is kept in a state; None where none is, so that the method's own answer counts."""
    if ANSWER in state:
        return weights_in(state, ANSWER)
    window = _window(state)
    return weighted_mean(window, [1.0 / len(window)] * len(window)) if window else None


def _window(state: Payload) -> list[Weights]:
    places = sum(name.startswith(f"{ANSWER}:") for name in state)
    return [weights_in(state, f"{ANSWER}:{place}") for place in range(places)]


# --- The best answer so far, by the images that parties keep back ----------------------------------------------------


def with_best(state: Payload, answer: Weights, figure: float, images: float) -> Payload:
    """The state with this answer as its best one, if its figure on so many images is higher than the best so far.

    Figures on fewer images than before (a site was away) do not count, and those on more make earlier ones void.

    >>> state = {}
    >>> for answer, figure, images in ((1, 0.5, 9), (2, 0.7, 9), (3, 0.6, 9), (4, 0.9, 5)):
    ...     state = with_best(state, answer, figure, images)
    >>> state["tacit:best"], with_best(state, 5, 0.1, 10)["tacit:best"]
    (2, 5)
    """
    if BEST in state:
        before = number_in(state, f"{BEST}:images"), number_in(state, f"{BEST}:figure")
        if (images, figure) <= before:
            return state
    return {**state, BEST: answer, f"{BEST}:figure": figure, f"{BEST}:images": images}


def best_answer(state: Payload) -> Weights | None:
    """The best answer so far; None where nobody asked for one."""
    return weights_in(state, BEST) if BEST in state else None


# --- The norms of recent rounds' updates, from which a bound follows (`robust.norm_quantile`) -------------------------


def with_norms(state: Payload, norms: Sequence[float], rounds: int) -> Payload:
    """The state with the norms of this round's updates, and without those of more than so many rounds ago.

    >>> state = {}
    >>> for norms in ([1.0, 2.0], [], [3.0], [4.0]):
    ...     state = with_norms(state, norms, 2)
    >>> list(state), norms_in(state)
    (['tacit:norms:0', 'tacit:norms:1'], [3.0, 4.0])
    """
    if not norms:
        return state
    others: Payload = {name: value for name, value in state.items() if not name.startswith(NORMS)}
    window = [*_norms(state), torch.tensor(norms, dtype=torch.float64)][-rounds:]
    return {**others, **{f"{NORMS}{place}": tensor for place, tensor in enumerate(window)}}


def norms_in(state: Payload) -> list[float]:
    return [norm for tensor in _norms(state) for norm in tensor.tolist()]


def _norms(state: Payload) -> list[Tensor]:
    return [tensor_in(state, name) for name in sorted((n for n in state if n.startswith(NORMS)), key=_place)]


def _place(name: str) -> int:
    return int(name.removeprefix(NORMS))


# --- The secret at real sites: the seed is known to all, who is asked and what noise is added must not be -------------


def with_secret(state: Payload) -> Payload:
    """The state with a number from the operating system's generator: of a run that is resumed it is the same one."""
    return {**state, SECRET: secrets.randbits(62) + 1}


def secret_in(state: Payload) -> int:
    """The number; 0 where there is none, and all randomness is by the seed."""
    value = state.get(SECRET, 0)
    return value if isinstance(value, int) else 0
