"""Who looks on while a run goes on."""

from collections.abc import Mapping
from typing import Any, Protocol

from tacit.contract.parties import RoundInfo
from tacit.runs.plan import Plan


class Watcher(Protocol):
    """Someone who looks on: a progress bar, a log, a test. It is told what happens and changes nothing."""

    def start(self, plan: "Plan", done: int) -> None: ...

    def client_done(self, round_info: RoundInfo, done: int, asked: int) -> None: ...

    def round_done(self, record: Mapping[str, Any]) -> None: ...

    def finish(self, summary: Mapping[str, Any]) -> None: ...


class NullWatcher:
    """The watcher that says nothing."""

    def start(self, plan: "Plan", done: int) -> None: ...

    def client_done(self, round_info: RoundInfo, done: int, asked: int) -> None: ...

    def round_done(self, record: Mapping[str, Any]) -> None: ...

    def finish(self, summary: Mapping[str, Any]) -> None: ...
