"""The pictures of docs/evidence.md: accuracy by round, the mean over seeds in a band from the worst to the best."""

from collections.abc import Sequence
from pathlib import Path

from tacit.compare.rows import Row
from tacit.papers.feddb_figures import pyplot
from tacit.runs.folder import Run


def draw(rows: Sequence[Row], path: Path) -> None:
    """One line a row; the lower bound is dotted, the upper one dashed."""
    figure, axis = pyplot().subplots(figsize=(9, 4.2))
    colours = pyplot().get_cmap("tab20")
    for number, row in enumerate(rows):
        by_seed = [
            {record["step"] + 1: 100 * record["accuracy"] for record in Run(job.folder).records if "accuracy" in record}
            for job in row.jobs
        ]
        steps = sorted(set.intersection(*(set(one) for one in by_seed)))
        values = [[one[step] for one in by_seed] for step in steps]
        style = {"lower": ":", "upper": "--"}.get(row.label, "-")
        colour = colours(number % 20) if style == "-" else "0.3"
        axis.plot(steps, [sum(v) / len(v) for v in values], style, color=colour, label=row.label, linewidth=1.4)
        axis.fill_between(
            steps, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.12, linewidth=0
        )
    axis.set(xlabel="round, all stages", ylabel="accuracy, %")
    axis.legend(fontsize="small", ncols=1, loc="center left", bbox_to_anchor=(1.01, 0.5))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot().close(figure)
