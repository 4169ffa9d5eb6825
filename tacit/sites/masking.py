"""Secure aggregation at real sites, a site's side: it answers the four questions of `tacit.sites.unseen`.

Its secrets are in this process's memory alone, of one round at a time. A site that is restarted in the middle of a
round has lost them, and is left out of that sum.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tacit.backends.base import Worker
from tacit.contract.fixed_point import Ring
from tacit.contract.kinds import Registration
from tacit.contract.method import Method, Reply, Task
from tacit.contract.sums import summation
from tacit.core.errors import TacitError
from tacit.core.payload import Payload, content_digest, tensor_in
from tacit.core.safeguards import Privacy
from tacit.engine.validation import refusal_reason
from tacit.sites.accept import Refusal
from tacit.sites.secagg import Participant
from tacit.sites.unseen import (
    ASKED,
    MOST,
    SEALED,
    context_of,
    keys_payload,
    packed_bytes,
    read_bounds,
    read_circle,
    shares_payload,
    unpacked_bytes,
    vector_payload,
)
from tacit.sites.wire import Request

UNKNOWN = "it knows nothing of this sum: it was restarted in the middle of the round, or was asked out of turn"
Work = Callable[[Payload, int, float], Ring]  # a task's content, how many clients are asked, the most examples of one


class Desk:
    """The secrets of the round that a site is in, and its answers."""

    def __init__(self) -> None:
        self._context = b""
        self._participant: Participant | None = None
        self._given: dict[str, tuple[str, Payload]] = {}  # by question: the digest of what came, and the answer

    def answer(self, request: Request, content: Payload, privacy: Privacy, work: Work) -> Payload:
        """What goes back. `work` trains, and makes whole numbers of the reply, which itself stays here.

        Flower may deliver a message twice: the same question has the same answer, without any work.
        """
        context, asked = context_of(request.run, request.step), content_digest(content)
        if request.kind == "keys" and (self._context != context or self._given.keys() - {"keys"}):
            self._context, self._participant, self._given = context, Participant(request.client, context), {}
        if self._participant is None or self._context != context:
            raise Refusal(UNKNOWN)
        if request.kind not in self._given:
            self._given[request.kind] = asked, self._new_answer(request.kind, self._participant, content, privacy, work)
        if self._given[request.kind][0] != asked:
            raise Refusal("it answered another question of this kind in this round")
        return self._given[request.kind][1]

    def _new_answer(
        self, kind: str, participant: Participant, content: Payload, privacy: Privacy, work: Work
    ) -> Payload:
        if kind == "keys":
            return keys_payload(participant.keys)
        if kind == "masked":
            with _told():
                asked, most = read_bounds(content)
                participant.take(unpacked_bytes(content, SEALED))
            sent = {name: value for name, value in content.items() if name not in (SEALED, ASKED, MOST)}
            vector = work(sent, asked, most)  # what goes wrong in it is not for the server
            with _told():
                return vector_payload(participant.mask(vector))
        with _told():
            if kind == "shares":
                return {"sealed": packed_bytes(participant.share(*read_circle(content, privacy.threshold)))}
            alive, gone = (tensor_in(content, name).tolist() for name in ("alive", "gone"))
            return shares_payload(participant.open(alive, gone))


@contextmanager
def _told() -> Iterator[None]:
    """What is wrong with a question of the server's is told to it: it tells nothing about the site."""
    try:
        yield
    except (TacitError, KeyError, TypeError) as error:
        raise Refusal(f"it does not go on with this sum: {error}") from None


def whole_numbers(
    method: Method, task: Task, reply: Reply, worker: Worker, privacy: Privacy, asked: int, most: float
) -> Ring:
    """A reply as it goes into a sum. The server cannot look at it any more, so the site does what the server did.

    What is wrong with it stays here, in a TacitError that is not for the server.
    """
    shard, classes = worker.federation.client_shard(task.client), len(worker.setup.classes)
    party = Registration(most, len(shard.labeled) > 0, len(shard.unlabeled) > 0)
    if why := refusal_reason(method.client_sends, task, reply, {}, classes, party):
        raise TacitError(f"its own reply is not fit for a sum: {why}")
    rule = summation(method, task.send, classes, privacy, asked, most)
    return rule.encode(reply, task.client in worker.setup.labeled_clients)
