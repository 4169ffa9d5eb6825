"""`python -m benchmarks.lengths PART=own-fashion`: the rounds with which each row of a part costs what one row costs.

The stages before the main one are run whole, of the main one a few rounds; CPU seconds without evaluation. Rows whose
rounds are to be equal in cost are given in one run of this command, because machines and their load differ.
`REFERENCE=provenance` is the method whose cost counts, place by place; `ROWS=server` measures the rows with that in
their label, and the reference.
"""

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import evidence
from tacit.core.settings import Experiment
from tacit.engine.run import run_experiment
from tacit.runs.folder import Run

MEASURED, SETTLED = 24, 8  # main rounds that are run, and those of them that are left out: first uses cost more


class Cost(NamedTuple):
    """CPU seconds of the stages before the main one, and of one main round."""

    before: float
    a_round: float

    def whole(self, rounds: int) -> float:
        return self.before + rounds * self.a_round

    def rounds_for(self, seconds: float) -> int:
        """Main rounds that fit into so many seconds.

        >>> Cost(before=20.0, a_round=0.25).rounds_for(120.0)
        400
        """
        return max(1, round((seconds - self.before) / self.a_round))


def cost_of(experiment: Experiment, folder: Path) -> Cost:
    short = {"rounds": MEASURED, "evaluate_every": MEASURED}
    run_experiment(experiment.model_copy(update=short), folder)
    return told_by(Run(folder).records)


def told_by(records: list[dict[str, Any]]) -> Cost:
    """The cost that records tell.

    >>> main = [{"stage": "main", "cpu_seconds": 9.0}] * SETTLED + [{"stage": "main", "cpu_seconds": 0.5}] * 3
    >>> told_by([{"stage": "warm-up", "cpu_seconds": 2.0}, {"stage": "warm-up", "cpu_seconds": 1.5}, *main])
    Cost(before=3.5, a_round=0.5)
    """
    main = [record["cpu_seconds"] for record in records if record["stage"] == "main"]
    return Cost(sum(r["cpu_seconds"] for r in records if r["stage"] != "main"), median(main[SETTLED:]))


def equal_rounds(costs: Mapping[str, tuple[Cost, int]], reference: str) -> dict[str, int]:
    """By label, the rounds with which a row costs what the reference costs in the same place.

    >>> equal_rounds({"server: ours": (Cost(60.0, 0.5), 80), "server: a": (Cost(0.0, 0.25), 9)}, "ours")
    {'server: ours': 80, 'server: a': 400}
    """
    found = {}
    for label, (cost, _) in costs.items():
        standard, rounds = costs[f"{label.partition(': ')[0]}: {reference}"]
        found[label] = cost.rounds_for(standard.whole(rounds))
    return found


def main() -> None:
    settings = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    reference, only = settings.get("REFERENCE", "provenance"), settings.get("ROWS", "")
    part = evidence.parts()[settings["PART"]]
    rows = evidence.rows_of(part, 1, {})
    bounds = {"lower", "upper"}  # have lengths of their own
    wanted = [row for row in rows if only in row.label and row.label.rpartition(": ")[2] not in bounds]
    places = {row.label.partition(": ")[0] for row in wanted}
    wanted += [row for row in rows if row not in wanted and row.label in {f"{place}: {reference}" for place in places}]
    costs = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, row in enumerate(wanted):
            experiment = row.jobs[0].experiment
            cost = cost_of(experiment, Path(folder) / str(number))
            costs[row.label] = cost, experiment.rounds
            print(f"{row.label}: {cost.before:.1f} s before, {1000 * cost.a_round:.0f} ms a main round", flush=True)
    for label, rounds in equal_rounds(costs, reference).items():
        print(f"{label}: {rounds} rounds (now {costs[label][1]})")


if __name__ == "__main__":
    main()
