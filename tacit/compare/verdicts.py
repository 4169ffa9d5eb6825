"""What a comparison says in sentences: did the unlabelled images help, and why is no gap shown?"""

from collections.abc import Sequence

from tacit.compare.convergence import RULE, sentence
from tacit.compare.results import Result
from tacit.compare.t_test import paired_test


def unsettled(blocks: Sequence[Sequence[Result]]) -> list[str]:
    """Why no gap is shown: which bounds have not converged, and how many more rounds it would take."""
    found = []
    for block in blocks:
        told = [sentence(line.bound, line.convergence) for line in block if line.convergence is not None]
        if any(told) and {line.bound for line in block} == {"lower", "upper", ""}:  # else there is no gap anyway
            where = f" ({block[0].setting})" if len(blocks) > 1 else ""
            found.append(f"No gap is shown{where}. {' '.join(text for text in told if text)} The rule: {RULE}.")
    return found


def verdicts(blocks: Sequence[Sequence[Result]]) -> list[str]:
    """Did the unlabelled images help? For each method beside a lower bound, in a sentence."""
    found = []
    for block in blocks:
        lower = next((line for line in block if line.bound == "lower"), None)
        for line in block if lower is not None else ():
            if not line.bound and lower is not None:
                found.append(verdict(line, lower))
    return [text for text in found if text]


def verdict(line: Result, lower: Result) -> str:
    """One method against the labels alone, over the seeds that both have."""
    score = lower.leads
    seeds = [
        seed
        for seed in line.runs
        if line.runs[seed].get(score) is not None and lower.runs.get(seed, {}).get(score) is not None
    ]
    test = paired_test(*([rows.runs[seed][score] for seed in seeds] for rows in (line, lower)))
    if test is None:
        return ""
    points, of = 100 * test.difference, score.replace("_", " ")
    text = f"{line.label} against the labels alone: {points:+.1f} points of {of}"
    if test.half_width is None:
        return f"{text} with one seed, which is no answer: run it with --seeds 3 or more."
    if not test.half_width:  # few test images have few possible figures
        return f"{text} in each of {len(seeds)} seeds, which is no answer: test on more images, or run more seeds."
    width = 100 * test.half_width
    text += f" (95 % interval {points - width:+.1f} to {points + width:+.1f}, {len(seeds)} seeds)"
    if points - width > 0:
        return f"{text}: the unlabelled images helped."
    if points + width < 0:
        return f"{text}: it did harm. Train on the labels alone, or try another method."
    return f"{text}: no difference that so many seeds can show."
