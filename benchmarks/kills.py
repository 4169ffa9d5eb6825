"""`make kills`: is a run that was killed, or whose folder was damaged, what it would have been?

*Kills*: runs of several methods, in one process and on the pool, are killed (SIGKILL) at random moments and resumed
until they are finished. Each must end with the model and the records of a run that nobody disturbed, leave no
half-written file behind, and pass `tacit check-run`. On the pool, a worker is killed now and then instead: the run
must go on by itself.

*Damage*: each file of a stopped and of a finished run is flipped in one byte, cut short, removed, overwritten with
garbage and replaced by a folder. Going on must either end in a sentence that names the file, or with the same result.

`make kills N=100 SEED=0` sets the number of runs; `ONLY=damage` or `ONLY=kills` runs one of the two.
"""

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import descendants
from tacit.config.resolve import resolve
from tacit.core.errors import TacitError
from tacit.core.settings import Experiment
from tacit.engine.run import run_experiment
from tacit.runs.folder import Run
from tacit.runs.integrity import check_run
from tacit.runs.watchers import NullWatcher

METHODS = (  # with warm-up stages, with memory at clients and without, labels in all three places
    ("fixmatch", "clients"),
    ("bsemifl", "server"),
    ("rscfed", "some-clients"),
    ("fedmatch", "server"),
    ("cbafed", "some-clients"),
    ("fedavg", "clients"),
)
CLOCK = ("seconds", "cpu_seconds", "phases")
NOT_RESULTS = ("run.lock", "card.md", "card.html", "calibration.svg")  # for people, who may edit them
MOST_KILLS = 4  # of one run


def experiment_of(method: str, placement: str, **changes: Any) -> Experiment:
    """Seconds on the embedded digits."""
    small = {"data.subset": 400, "data.test_subset": 200, "rounds": 4}
    return resolve({"method.name": method, "method.preset": "smoke", "data.placement": placement}, small, changes)


def outcome(folder: Path) -> tuple[str, list[dict[str, Any]]]:
    """What must not differ: the model's bytes and the records, without what a clock says."""
    records = [{k: v for k, v in record.items() if k not in CLOCK} for record in Run(folder).records]
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(), records


# --- Kills --------------------------------------------------------------------------------------------------


def start(experiment: Experiment, folder: Path) -> int:
    """Run or resume in a process of its own, forked from this one, which has imported everything already."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        sys.stderr = sys.stdout = (folder.parent / f"{folder.name}.log").open("a")
        run_experiment(experiment, folder, resume=True)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def ended(pid: int, within: float) -> int | None:
    """The exit code of a process if it ends within so many seconds."""
    end = time.monotonic() + within
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            return None
        time.sleep(0.002)


def killed_run(experiment: Experiment, folder: Path, seconds: float, chance: random.Random) -> int:
    """Run into a folder with kills at random moments, and resume until it is finished; how many kills there were."""
    kills = 0
    while True:
        pid, disturbed = start(experiment, folder), False
        while True:
            code = ended(pid, chance.uniform(0, seconds) if kills < MOST_KILLS else 3600.0)
            if code is not None or kills == MOST_KILLS:
                break
            workers = descendants(pid)
            if workers and chance.random() < 0.3:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(chance.choice(workers), signal.SIGKILL)  # the run goes on by itself
                    kills, disturbed = kills + 1, True
            else:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                kills, disturbed = kills + 1, True
                break
        if code == 0 or not disturbed:  # workers that die again and again end a run with a sentence: it is resumed
            return kills


def campaign(number: int, seed: int, folder: Path) -> tuple[int, int, list[str]]:
    """So many runs; how many ended as they should, the kills in all, and what was wrong."""
    whole: dict[tuple[str, str, str], tuple[Any, float]] = {}
    kills, wrong = 0, []
    for turn in range(number):
        chance = random.Random(f"{seed}/{turn}")
        method, placement = METHODS[turn % len(METHODS)]
        backend = ("local", "pool")[turn // len(METHODS) % 2]
        experiment = experiment_of(method, placement, **{"backend.name": backend, "backend.workers": 2})
        if (method, placement, backend) not in whole:
            place, started = folder / f"whole-{method}-{backend}", time.monotonic()
            if ended(start(experiment, place), 3600.0) != 0:
                raise SystemExit(f"{method} on {backend} failed without any kill: see {place}.log")
            whole[method, placement, backend] = outcome(place), time.monotonic() - started
        expected, seconds = whole[method, placement, backend]
        place = folder / f"{turn}-{method}-{backend}"
        kills += killed_run(experiment, place, seconds, chance)
        if why := _difference(place, expected):
            wrong.append(f"{place.name}: {why}")
        else:
            shutil.rmtree(place)
        print(f"{turn + 1} of {number}: {place.name}, {kills} kills so far, {len(wrong)} wrong", flush=True)
    return number - len(wrong), kills, wrong


def _difference(place: Path, expected: Any) -> str:
    try:
        if outcome(place) != expected:
            return "another model or other records"
        if found := check_run(place):
            return f"check-run: {found[0]}"
    except (TacitError, OSError) as error:
        return f"not finished: {error}"
    left = [path.name for path in place.rglob(".tacit-tmp-*")]
    return f"left behind: {left[0]}" if left else ""


# --- Damage -------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def garbage(path: Path) -> None:
    path.write_bytes(random.Random(path.name).randbytes(500))


def replace_by_folder(path: Path) -> None:
    path.unlink()
    (path / "inside").mkdir(parents=True)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "flipped": flip,
    "cut": cut,
    "removed": Path.unlink,
    "garbage": garbage,
    "folder": replace_by_folder,
}


class Stop(NullWatcher):
    """Ctrl-C after so many rounds."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def round_done(self, record: Any) -> None:
        if record["step"] + 1 == self.rounds:
            raise KeyboardInterrupt


def files_of(folder: Path) -> Iterator[Path]:
    """The files of a run that matter, one version of what a client keeps for all of them."""
    memories = set()
    for path in sorted(folder.rglob("*")):
        kind = path.name.split("@")[0] if "@" in path.name else ""
        if path.is_file() and path.name not in NOT_RESULTS and "pictures" not in path.parts:
            if kind and (kind in memories or path != max(path.parent.glob(f"{kind}@*"), key=lambda p: p.name)):
                continue
            memories.add(kind)
            yield path.relative_to(folder)


class Heard(NullWatcher):
    """Remembers what it was told at the start."""

    notes: tuple[str, ...] = ()

    def start(self, plan: Any, done: int) -> None:
        self.notes = plan.warnings


def verdict(experiment: Experiment, folder: Path, file: Path, expected: Any) -> str:
    """What became of a damaged run: 'refused' or 'same' are right, anything else is not."""
    heard = Heard()
    try:
        run_experiment(experiment, folder, resume=True, watcher=heard)
    except TacitError as error:
        return "refused" if file.name in str(error) else f"refused without naming it: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if outcome(folder) != expected:
        return "another result in silence"
    return "same, and told" if any(file.name in note for note in heard.notes) else "same"


def damage_matrix(folder: Path) -> tuple[Counter[str], list[str]]:
    """Every file of a stopped and a finished run, damaged in every way: how it ended, and what was wrong."""
    seen: Counter[str] = Counter()
    wrong = []
    for method, placement in (("fixmatch", "clients"), ("bsemifl", "server")):  # a stage before; a memory
        experiment = experiment_of(method, placement)
        finished, stopped = folder / f"{method}-finished", folder / f"{method}-stopped"
        run_experiment(experiment, finished)
        expected = outcome(finished)
        with contextlib.suppress(KeyboardInterrupt):
            run_experiment(experiment, stopped, watcher=Stop(3))
        for base in (stopped, finished):
            for file in list(files_of(base)):
                for name, damage in DAMAGES.items():
                    place = folder / "damaged"
                    shutil.copytree(base, place)
                    damage(place / file)
                    found = verdict(experiment, place, file, expected)
                    shutil.rmtree(place)
                    seen[found if found in ("refused", "same", "same, and told") else "wrong"] += 1
                    if found not in ("refused", "same", "same, and told"):
                        wrong.append(f"{base.name}/{file} {name}: {found}")
                        print(wrong[-1], flush=True)
    return seen, wrong


def main(arguments: list[str]) -> None:
    given = dict(argument.split("=", 1) for argument in arguments)
    number, seed, only = int(given.get("N") or 100), int(given.get("SEED") or 0), given.get("ONLY", "")
    torch.set_num_threads(1)
    wrong: list[str] = []
    told: dict[str, Any] = {"seed": seed}
    folder = Path(tempfile.mkdtemp(prefix="tacit-kills-"))
    if only != "damage":
        right, kills, wrong = campaign(number, seed, folder)
        told["kills"] = f"{right} of {number} runs with {kills} kills ended with the same model and records"
        print(told["kills"])
    if only != "kills":
        seen, more = damage_matrix(folder)
        wrong += more
        told["damage"] = dict(seen)
        print(f"Damage: {', '.join(f'{count} {what}' for what, count in seen.most_common())}")
    print(json.dumps(told))
    if wrong:
        raise SystemExit("\n".join([*wrong, f"What is left of them is in {folder}"]))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
