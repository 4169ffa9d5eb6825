"""Runs the walk of docs/your-own-images.md and writes its outputs into the page.

`python -m benchmarks.own_walk FOLDER` writes the images into FOLDER (`benchmarks.own_images`), runs every command there
and replaces the blocks between `<!-- walk: NAME -->` and `<!-- /walk -->`. `python -m benchmarks.own_walk FOLDER init
dry-run` runs only these and leaves the other blocks as they are; what was made before is used again. The step `compare`
takes six times as long as `run` and must be named.
"""

import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks.own_images import write

PAGE = Path(__file__).parents[1] / "docs" / "your-own-images.md"
BLOCK = re.compile(r"(<!-- walk: (?P<name>[\w-]+) -->\n).*?(<!-- /walk -->)", flags=re.DOTALL)
WIDTH = 112  # of a line on the page; longer ones are broken
RUN = "runs/clothes-seed0"


def everything(lines: list[str]) -> list[str]:
    return lines


def last(count: int) -> Callable[[list[str]], list[str]]:
    return lambda lines: lines[-count:]


def starting(*words: str) -> Callable[[list[str]], list[str]]:
    """The lines that begin with one of these (frames of tables aside); '…' stands for those between."""

    def keep(lines: list[str]) -> list[str]:
        shown: list[str] = []
        for line in lines:
            if line.lstrip("│┃ ").startswith(words):
                shown.append(line)
            elif not shown or shown[-1] != "…":
                shown.append("…")
        return shown

    return keep


def after_rounds(lines: list[str]) -> list[str]:
    """What stands below the progress of runs: the table and what it says."""
    rounds = [place for place, line in enumerate(lines) if re.search(r"(warm-up|main) round \d+ ", line)]
    return lines[rounds[-1] + 1 :] if rounds else lines


class Step(NamedTuple):
    """A command of the walk, and which lines of its output the page shows."""

    command: str
    keep: Callable[[list[str]], list[str]] = everything
    long: bool = False  # only when it is named

    @property
    def shown(self) -> str:
        """As a reader gives it, who does it for the first time."""
        return self.command.removesuffix(" --force").removesuffix(" --resume")


STEPS: dict[str, Step] = {
    "init": Step("tacit init clothes --force"),
    "dry-run": Step("tacit run clothes.toml --dry-run", last(18)),
    "run": Step("tacit run clothes.toml --resume", last(7)),
    "card": Step(f"grep -e '^[*][*]' -e '^- [*][*]' -e 'Labels kept for' {RUN}/card.md"),
    "evaluate": Step(
        f"tacit evaluate {RUN} --data clothes-labelled-later",
        starting("Accuracy", "Balanced", "AUC", "class", "bag", "coat", "shirt", "sneaker"),
    ),
    "trained-on": Step(f"tacit evaluate {RUN} --data clothes", starting("Accuracy", "Balanced", "Beware")),
    "compare": Step("tacit compare clothes.toml --bounds --seeds 3", after_rounds, long=True),
    "predict": Step(f"tacit predict {RUN} clothes-new -o predictions.csv --abstain 0.8", last(7)),
    "export": Step(f"tacit export {RUN} --to onnx -o clothes.onnx"),
    "advise": Step(f"tacit advise {RUN} --count 20", last(8)),
    "advice": Step(f"head -n 3 {RUN}/kept/client-0/advice.csv"),
}


def output_of(step: Step, folder: Path) -> str:
    """What a command prints in the folder beside the images, without colours and without this machine's paths."""
    words = shlex.split(step.command)
    program = [sys.executable, "-m", *words] if words[0] == "tacit" else words
    environment = {**os.environ, "COLUMNS": str(WIDTH), "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{step.command}:\n{done.stdout}{done.stderr}")
    text = done.stdout.replace(f"{folder.resolve()}/", "")
    shown = [line.rstrip() for line in text.splitlines()]
    return block([f"$ {step.shown}", *step.keep(shown)])


def block(lines: list[str]) -> str:
    """Indented as Markdown wants code, long lines broken.

    >>> block(["$ tacit", "", "  · a"])
    '\\n    $ tacit\\n\\n      · a\\n\\n'
    >>> max(len(line) for line in block(["word " * 100]).splitlines()) <= WIDTH + 4
    True
    """
    broken: list[str] = []
    for line in lines:
        inner = " " * (len(line) - len(line.lstrip()) + 2)
        broken += textwrap.wrap(line, WIDTH, subsequent_indent=inner, break_on_hyphens=False) or [""]
    return "\n" + "\n".join(f"    {line}".rstrip() for line in broken) + "\n\n"


def rendered(page: str, outputs: Mapping[str, str]) -> str:
    """The page with new blocks; those that have no new output stay.

    >>> rendered("<!-- walk: a -->\\nold<!-- /walk -->", {"a": "new", "b": "x"})
    '<!-- walk: a -->\\nnew<!-- /walk -->'
    """

    def new(found: re.Match[str]) -> str:
        return f"{found[1]}{outputs[found['name']]}{found[3]}" if found["name"] in outputs else found[0]

    return BLOCK.sub(new, page)


def main(folder: Path, names: list[str]) -> None:
    """`folder` is where the images lie, called clothes; the commands run beside it."""
    images = folder / "clothes"
    if not images.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        write(images, "fashion-mnist")
    wanted = names or [name for name, step in STEPS.items() if not step.long]
    outputs = {}
    for name in wanted:
        print(f"{name}: {STEPS[name].command}", flush=True)
        outputs[name] = output_of(STEPS[name], folder)
        PAGE.write_text(rendered(PAGE.read_text(), outputs))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
