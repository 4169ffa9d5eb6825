"""Killed anywhere, it goes on and ends with the same bytes. Real processes, real kills."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver
from pathlib import Path

import pytest

from benchmarks.machine import descendants
from runs import TINY, digest, timeless
from tacit.config.resolve import resolve
from tacit.contract.parties import RoundInfo
from tacit.core import payload
from tacit.core.errors import TacitError
from tacit.engine.run import run_experiment
from tacit.runs.folder import Run
from tacit.runs.watchers import NullWatcher

SETTINGS = {
    "method.name": "fixmatch",
    "method.preset": "smoke",
    "data.placement": "clients",
    "rounds": 5,
    **TINY,
}
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
LONG = 300.0  # seconds: a busy machine is slow, not wrong; a new process with a pool needs ten of a core's own


def command(folder: Path, *more: str, **changes: object) -> list[str]:
    sets = [f"--set={key}={value}" for key, value in {**SETTINGS, **changes}.items()]
    return [sys.executable, "-m", "tacit", "run", *sets, "--out", str(folder), *more]


def start(folder: Path, *more: str, **changes: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command(folder, *more, **changes), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT
    )


def wait_for(condition: object, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + LONG
    while not condition():  # type: ignore[operator]
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"nothing happened within {LONG:g} s"
        time.sleep(0.01)


def rounds_done(folder: Path) -> int:
    try:
        return len(Run(folder).records)
    except TacitError:
        return 0


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_experiment(resolve(SETTINGS), tmp_path_factory.mktemp("whole") / "run")


@pytest.mark.parametrize("backend", ["local", "pool"])
def test_kill_nine_at_three_moments(backend: str, whole: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for kill_at, delay in ((0, 0.05), (2, 0.0), (3, 0.11)):  # before the first record, at a boundary, inside a round
        process = start(folder, "--resume", **{"backend.name": backend, "backend.workers": 2})
        wait_for((folder / "experiment.toml").is_file, process)
        wait_for(lambda kill_at=kill_at: rounds_done(folder) >= kill_at, process)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert (Run(folder).summary is None) or kill_at == 3
    process = start(folder, "--resume", **{"backend.name": backend, "backend.workers": 2})
    output = process.communicate(timeout=LONG)[0]
    assert process.returncode == 0, output
    assert digest(Run(folder)) == digest(whole)
    assert timeless(Run(folder)) == timeless(whole)
    assert not (folder / "replies").exists()


def test_control_c_says_how_to_go_on(whole: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(folder)
    wait_for(lambda: rounds_done(folder) >= 1, process)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=LONG)[0]
    assert process.returncode == 130, output
    assert "--resume" in output
    assert "Traceback" not in output
    resumed = subprocess.run(
        [sys.executable, "-m", "tacit", "resume", str(folder)], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert resumed.returncode == 0, resumed.stderr
    assert digest(Run(folder)) == digest(whole)


def test_half_written_files_do_no_harm(whole: Run, tmp_path: Path) -> None:
    """A cut-off last record, a stray temporary file, a record beyond the checkpoint: all of them are got over."""
    folder = tmp_path / "run"

    class Stop:
        def start(self, plan: object, done: int) -> None: ...
        def client_done(self, round_info: object, done: int, asked: int) -> None: ...
        def round_done(self, record: dict) -> None:
            if record["step"] == 2:
                raise KeyboardInterrupt

        def finish(self, summary: object) -> None: ...

    with pytest.raises(KeyboardInterrupt):
        run_experiment(resolve(SETTINGS), folder, watcher=Stop())
    with (folder / "rounds.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "stage": "main", "round": 2, "accuracy": 99}) + "\n" + '{"step": 4, "acc')
    (folder / "checkpoint" / ".latest.safetensors.123").write_bytes(b"half")
    assert len(Run(folder).records) == 4
    resumed = run_experiment(resolve(SETTINGS), folder, resume=True)
    assert timeless(resumed) == timeless(whole)
    assert digest(resumed) == digest(whole)


def test_an_existing_run_is_never_overwritten(whole: Run) -> None:
    before = digest(whole)
    with pytest.raises(TacitError, match=r"already holds a run \(6 rounds done\).*--resume"):
        run_experiment(resolve(SETTINGS), whole.folder)
    assert digest(whole) == before
    assert run_experiment(resolve(SETTINGS), whole.folder, resume=True).summary == whole.summary


def test_other_settings_are_refused_with_the_difference(whole: Run) -> None:
    with pytest.raises(TacitError) as caught:
        run_experiment(resolve(SETTINGS, {"train.lr": 0.5}), whole.folder, resume=True)
    assert "train.lr: 0.1 in the run, 0.5 now" in str(caught.value)
    assert "tacit resume" in str(caught.value)


def test_another_backend_may_go_on(whole: Run, tmp_path: Path) -> None:
    """Begun in this process, finished on the pool, with the same bytes."""

    class Stop(NullWatcher):
        def round_done(self, record: object) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_experiment(resolve(SETTINGS), tmp_path / "run", watcher=Stop())
    pool = resolve(SETTINGS, {"backend.name": "pool", "backend.workers": 2})
    assert digest(run_experiment(pool, tmp_path / "run", resume=True)) == digest(whole)


def test_lost_records_are_noticed(whole: Run, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(whole.folder, folder)
    (folder / "summary.json").write_text('{"half')
    lines = (folder / "rounds.jsonl").read_text().splitlines(keepends=True)
    (folder / "rounds.jsonl").write_text("".join([*lines[:2], "{broken\n", *lines[3:]]))
    with pytest.raises(TacitError, match=r"rounds\.jsonl: line 3, the record of round 2, is not as"):
        run_experiment(resolve(SETTINGS), folder, resume=True)
    (folder / "rounds.jsonl").write_text("".join(lines))
    fixed = run_experiment(resolve(SETTINGS), folder, resume=True)  # and the broken summary is made again
    assert fixed.summary is not None
    assert fixed.summary["accuracy"] == whole.summary["accuracy"]  # type: ignore[index]


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(folder, rounds=200)
    wait_for((folder / "experiment.toml").is_file, process)
    try:
        with pytest.raises(TacitError, match=f"Another process \\(number {process.pid}\\)"):
            run_experiment(resolve(SETTINGS, {"rounds": 200}), folder, resume=True)
    finally:
        process.kill()
        process.communicate()


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(TacitError, match=r"not empty and holds no run \(thesis.tex"):
        run_experiment(resolve(SETTINGS), tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "precious"
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_workers_do_not_outlive_a_killed_engine(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(folder, rounds=200, **{"backend.name": "pool", "backend.workers": 2})
    wait_for(lambda: rounds_done(folder) >= 1, process)
    wait_for(lambda: len(descendants(process.pid)) >= 3, process)  # the fork server and two workers

    family = descendants(process.pid)
    process.kill()
    process.communicate(timeout=LONG)  # they have its standard output, too: it closes when the last of them is gone
    deadline = time.monotonic() + LONG
    while alive := [pid for pid in family if state_of(pid) not in ("", "Z")]:
        assert time.monotonic() < deadline, f"still there: {alive}"
        time.sleep(0.05)
    # The folder is free at once for whoever resumes.
    before = rounds_done(folder)
    resumed = start(folder, "--resume", rounds=200, **{"backend.name": "local"})
    wait_for(lambda: rounds_done(folder) > before, resumed)
    resumed.kill()
    resumed.communicate()


def test_a_killed_worker_does_not_end_the_run(whole: Run, tmp_path: Path) -> None:
    """A new pool does what was not answered, also where the server that starts workers was killed, too."""
    killed = []

    class Killer(NullWatcher):
        def client_done(self, round_info: RoundInfo, done: int, asked: int) -> None:
            if done == 1 and round_info.step in (1, 2):
                if round_info.step == 2:
                    os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)
                killed.append(multiprocessing.active_children()[0].pid)
                os.kill(killed[-1], signal.SIGKILL)

    pool = resolve(SETTINGS, {"backend.name": "pool", "backend.workers": 2})
    assert digest(run_experiment(pool, tmp_path / "run", watcher=Killer())) == digest(whole)
    assert len(killed) == 2
    assert timeless(Run(tmp_path / "run")) == timeless(whole)


def test_workers_that_die_again_and_again_end_the_run_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise BrokenProcessPool

    monkeypatch.setattr("tacit.backends.pool.ProcessPoolExecutor.submit", broken)
    with pytest.raises(TacitError, match=r"4 times in a row .*--resume"):
        run_experiment(resolve(SETTINGS, {"backend.name": "pool", "backend.workers": 2}), tmp_path / "run")


def state_of(pid: int) -> str:
    """R, S, Z …, or nothing if the process is gone."""
    fields = read_stat(Path(f"/proc/{pid}/stat"))
    return fields[0] if fields else ""


def read_stat(path: Path) -> list[str]:
    try:
        return path.read_text().rsplit(")", 1)[1].split()
    except OSError:
        return []


WITHOUT_TRACKER = """
import os, signal, sys
from multiprocessing import resource_tracker
from pathlib import Path

from tacit.engine.run import run_experiment
from tacit.runs.watchers import NullWatcher
from tacit.config.resolve import resolve


class Kill(NullWatcher):
    def round_done(self, record):
        if record["step"] == 0:
            os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)
            os.waitpid(resource_tracker._resource_tracker._pid, 0)


small = {"data.subset": 400, "data.test_subset": 200, "backend.name": "pool", "backend.workers": 2}
experiment = resolve({"method.name": "fedavg", "method.preset": "smoke", "data.placement": "clients"}, small)
print(run_experiment(experiment, Path(sys.argv[1]), watcher=Kill()).summary["rounds"])
"""


def test_a_killed_resource_tracker_prints_nothing(tmp_path: Path) -> None:
    """Python's own helper of the pool: the run goes on and ends without it, and without tracebacks."""
    words = [sys.executable, "-c", WITHOUT_TRACKER, str(tmp_path / "run")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "2"
    assert done.stderr == ""


def test_a_round_that_cannot_be_saved_ends_the_run_and_is_made_again(
    whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written by a thread: what goes wrong there is not swallowed, and rounds before it are kept."""
    write, folder = payload.write, tmp_path / "run"

    def full(path: Path, state: payload.Payload) -> str:
        if path.stem == "step-2":
            raise OSError(28, "No space left on device")
        return write(path, state)

    monkeypatch.setattr(payload, "write", full)
    with pytest.raises(OSError, match="No space left"):
        run_experiment(resolve(SETTINGS), folder)
    monkeypatch.undo()
    run = run_experiment(resolve(SETTINGS), folder, resume=True)
    assert digest(run) == digest(whole)
    assert timeless(run) == timeless(whole)
