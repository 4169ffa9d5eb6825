"""What safeguards cost: rounds of FedAvg with each of them against rounds without, turn by turn, in CPU time and bytes.

Bounds and robust means work on the server alone. With noise at the clients each of them clips and noises its own
reply. The accounting of epsilon is part of a round; its first one loads the library, and is not counted.
"""

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.running import UNEVALUATED, Rounds, open_rounds
from benchmarks.timing import Row, interleaved, ratio, single_thread
from tacit.config.resolve import resolve
from tacit.runs.plan import prepare

TITLE = "Privacy and robustness"

SETTINGS: dict[str, Any] = {
    "method": "fedavg",
    "data.name": "fashion-mnist",
    "data.placement": "some-clients",
    "data.labeled_clients": 10,
    "data.partition": "iid",
    "data.subset": 3000,
    "net.name": "cnn-16",
    "net.norm": "gn",
    "train.batch": 64,
    "device": "cpu",
    "backend.name": "local",
    **UNEVALUATED,
}
NOISE = {"privacy.clip": 1.0, "privacy.noise": 1.0}
SAFEGUARDS: dict[str, dict[str, Any]] = {
    "bounds": {"robust.norm_quantile": 0.5, "robust.max_examples": 1000},
    "median": {"robust.mean": "median"},
    "trimmed mean": {"robust.mean": "trimmed-mean", "robust.trim": 0.3},
    "multi-Krum": {"robust.mean": "multi-krum", "robust.byzantine": 3},
    "noise at the server": NOISE,
    "noise at the clients": {**NOISE, "privacy.where": "clients", "privacy.sampling": "fixed"},
}
PLAIN = "none"


def bytes_of(rounds: Rounds) -> int:
    """What travelled in the last round, both ways."""
    return int(rounds.record["bytes_up"] + rounds.record["bytes_down"])


def measure(changes: Mapping[str, Any] | None = None, times: int = 5) -> list[Row]:
    with (
        single_thread(),
        tempfile.TemporaryDirectory(prefix="tacit-bench-") as folder,
        ExitStack() as stack,
    ):
        running = {
            name: stack.enter_context(
                open_rounds(prepare(resolve(SETTINGS, changes or {}, settings)), Path(folder, name.replace(" ", "-")))
            )
            for name, settings in {PLAIN: {}, **SAFEGUARDS}.items()
        }
        spent = interleaved({name: rounds.next for name, rounds in running.items()}, times)
        travelled = {name: bytes_of(rounds) for name, rounds in running.items()}
    rows, note = [], f"FedAvg, 10 clients; {travelled[PLAIN]:,} bytes a round without"
    for name in SAFEGUARDS:
        rows.append(ratio(f"{name}: a round's CPU time over one without", spent[name], spent[PLAIN], note=note))
        rows.append(Row(f"{name}: a round's bytes over one without", travelled[name] / travelled[PLAIN]))
    return rows
