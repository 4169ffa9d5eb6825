"""Which replies may reach the mean, and why the others may not."""

import math
from collections.abc import Mapping

from tacit.contract import kinds
from tacit.contract.kinds import Registration
from tacit.contract.method import Reply, Task
from tacit.core.payload import Payload
from tacit.core.text import safe


def refusal_reason(
    expected: Mapping[str, str],
    task: Task,
    reply: Reply,
    state: Payload,
    classes: int,
    party: Registration | None = None,
) -> str:
    """Why a reply must not reach the mean; '' if it may."""
    party = party or Registration()
    known = {name.removesuffix("?") for name in expected}
    for name in reply.send:
        if name not in known:
            return f"'{safe(name)}' was not expected"
    for name, declared in expected.items():
        bare, kind = name.removesuffix("?"), kinds.parse(declared)
        due = None if name != bare else kinds.is_due(kind, party)
        if bare not in reply.send:
            if due:
                return f"'{bare}' is missing"
            continue
        if due is False:
            return f"'{bare}' was not expected of a client without {kind.due} images"
        like = task.send.get(bare, state.get(bare))
        if why := kinds.invalid_reason(kind, bare, reply.send[bare], like, party, classes):
            return why
    if not (math.isfinite(reply.examples) and reply.examples >= 0):
        return f"its number of examples is {reply.examples}"
    if reply.examples > party.most:
        return f"its number of examples is {reply.examples:g}, more than the {party.most:g} that it can have"
    return ""
