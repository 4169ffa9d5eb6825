"""A run folder that knows when it was damaged: what is wrong is named, and nothing else is computed from it."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.kills import DAMAGES, Heard, Stop, experiment_of, files_of, outcome, verdict
from tacit.config.resolve import resolve
from tacit.core import payload
from tacit.core.errors import TacitError
from tacit.core.files import atomic_path, sweep, write_atomically
from tacit.core.settings import Keep
from tacit.engine.run import run_experiment
from tacit.runs.folder import Run
from tacit.runs.integrity import check_run
from tacit.runs.manifest import Manifest, load_manifest
from tacit.runs.memory import ClientMemory
from tacit.runs.watchers import NullWatcher
from tacit.runs.writer import roll_back

# A stage before the method, a memory at each client.
SETTINGS = {"keep.checkpoints": 2, "data.subset": 200, "data.test_subset": 100}
EXPERIMENT = experiment_of("rscfed", "some-clients", **SETTINGS)
DONE = 3  # rounds of all stages, where the stopped run was stopped


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_experiment(EXPERIMENT, tmp_path_factory.mktemp("finished") / "run")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(KeyboardInterrupt):
        run_experiment(EXPERIMENT, folder, watcher=Stop(DONE))
    return Run(folder)


@pytest.fixture
def copy(stopped: Run, tmp_path: Path) -> Path:
    """A run that was stopped, to be damaged."""
    return Path(shutil.copytree(stopped.folder, tmp_path / "run"))


def newest_checkpoint(folder: Path) -> Path:
    return Run(folder).checkpoints()[DONE]


def test_what_was_written_passes(finished: Run, stopped: Run) -> None:
    assert check_run(finished.folder) == []
    assert check_run(stopped.folder) == []
    assert list(stopped.checkpoints()) == [DONE, DONE - 1]
    written = load_manifest(stopped.folder)
    assert written is not None
    assert any(entry["kept"] for entry in written.rounds)  # there is a memory to look after
    assert written.stages


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("which", ["finished", "stopped"])
def test_every_damaged_file_is_named(how: str, which: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    run: Run = request.getfixturevalue(which)
    for file in files_of(run.folder):
        folder = Path(shutil.copytree(run.folder, tmp_path / "run"))
        DAMAGES[how](folder / file)
        older = file.name == f"step-{len(run.records) - 1}.safetensors"
        if older and how == "removed":  # nobody is sure that it must be there: a run that went back has none
            pass
        elif file.name == "manifest.jsonl":
            try:
                found = check_run(folder)
            except TacitError as error:
                found = [str(error)]
            assert "manifest.jsonl" in found[0] or how == "cut", found
        else:
            found = check_run(folder)
            assert any(file.name in line for line in found), (file, found)
            assert all("`tacit resume`" in line or "--out" in line or "finished" in line for line in found)
        shutil.rmtree(folder)


def test_a_damaged_checkpoint_costs_a_round_and_not_the_run(copy: Path, finished: Run) -> None:
    newest = newest_checkpoint(copy)
    DAMAGES["flipped"](newest)
    heard = Heard()
    resumed = run_experiment(EXPERIMENT, copy, resume=True, watcher=heard)
    assert f"{newest.name} is damaged" in heard.notes[0]
    assert f"goes on from round {DONE - 1} instead of {DONE}" in heard.notes[0]
    assert outcome(resumed.folder) == outcome(finished.folder)
    assert check_run(copy) == []


@pytest.mark.parametrize("what", ["removed", "folder", "another payload", "a stage's"])
def test_what_lies_in_place_of_a_checkpoint(what: str, copy: Path) -> None:
    """Both checkpoints are gone: finished rounds are not dropped in silence."""
    for path in Run(copy).checkpoints().values():
        if what in DAMAGES:
            DAMAGES[what](path)
        elif what == "another payload":
            payload.write(path, {"x": torch.zeros(2)})
        else:
            shutil.copy(copy / "checkpoint" / "stage-0.safetensors", path)
    with pytest.raises(TacitError) as caught:
        run_experiment(EXPERIMENT, copy, resume=True)
    assert f"step-{DONE}.safetensors" in str(caught.value)
    assert f"step-{DONE - 1}.safetensors" in str(caught.value) or what == "removed"
    assert "--out" in str(caught.value)
    assert len(Run(copy).records) == DONE


def test_a_missing_or_damaged_memory_is_named(copy: Path) -> None:
    """One of a client that was not asked in the last two rounds has no second copy."""
    for path in list((copy / "kept").rglob("*@*")):
        path.unlink()
    with pytest.raises(TacitError, match=r"kept/client-\d+/.+@\d+-\d+\.safetensors is missing"):
        run_experiment(EXPERIMENT, copy, resume=True)


def test_an_edited_record_and_a_changed_seed_are_noticed(copy: Path) -> None:
    path = copy / "rounds.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0].replace('"step": 0', '"step": 0, "accuracy": 1.0') + "".join(lines[1:]))
    with pytest.raises(TacitError, match=r"rounds\.jsonl: line 1, the record of round 0, is not as it was written"):
        run_experiment(EXPERIMENT, copy, resume=True)
    path.write_text("".join(lines))
    settings = copy / "experiment.toml"
    settings.write_text(settings.read_text().replace("seed = 0", "seed = 7"))
    with pytest.raises(TacitError, match=r"experiment\.toml was changed after the run began:\s+seed: 0 in the run, 7"):
        run_experiment(Run(copy).experiment, copy, resume=True)


@pytest.mark.parametrize("line", ["{broken", "123", "{}", "[]", "\0\xff"])
def test_lines_that_are_no_records(line: str, copy: Path) -> None:
    path = copy / "rounds.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(f"{lines[0]}{line}\n{''.join(lines[2:])}")
    with pytest.raises(TacitError, match=r"rounds\.jsonl: line 2"):
        run_experiment(EXPERIMENT, copy, resume=True)
    (copy / "manifest.jsonl").unlink()  # as in a run of an older version
    with pytest.raises(TacitError, match=r"rounds\.jsonl is damaged"):
        run_experiment(EXPERIMENT, copy, resume=True)


def test_a_damaged_result_is_made_again(finished: Run, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(finished.folder, tmp_path / "run"))
    (folder / "summary.json").write_text("[]")
    (folder / "model.safetensors").unlink()
    again = run_experiment(EXPERIMENT, folder, resume=True)
    assert outcome(folder) == outcome(finished.folder)
    assert again.summary is not None
    assert check_run(folder) == []
    again.add_to_summary(gap_closed=0.5)  # what is added later is no damage
    assert check_run(folder) == []
    assert run_experiment(EXPERIMENT, folder, resume=True).summary["gap_closed"] == 0.5  # type: ignore[index]


def test_settings_and_split_are_restored(copy: Path, finished: Run) -> None:
    """All that decides the outcome can be read from the manifest, or drawn again and compared."""
    (copy / "experiment.toml").write_text("")
    (copy / "split.npz").write_bytes(b"garbage")
    (copy / "kept" / "notes.txt").write_text("mine")
    (copy / "kept" / "client-x").mkdir()
    heard = Heard()
    run_experiment(Run(copy).experiment, copy, resume=True, watcher=heard)
    assert "experiment.toml was missing or damaged" in heard.notes[0]
    assert "split.npz was missing or damaged" in heard.notes[1]
    assert outcome(copy) == outcome(finished.folder)
    assert (copy / "kept" / "notes.txt").read_text() == "mine"


def test_a_run_without_a_manifest_goes_on(copy: Path, finished: Run) -> None:
    """Of an older version: one checkpoint of another name, and nobody knows more than what is there."""
    checkpoint = newest_checkpoint(copy)
    checkpoint.rename(checkpoint.with_name("latest.safetensors"))
    Run(copy).checkpoints()[DONE - 1].unlink()
    (copy / "manifest.jsonl").unlink()
    assert "manifest.jsonl is missing" in check_run(copy)[0]
    heard = Heard()
    run_experiment(EXPERIMENT, copy, resume=True, watcher=heard)
    assert f"the {DONE} rounds that are done were taken as they are" in heard.notes[0]
    assert outcome(copy) == outcome(finished.folder)


def test_rolling_back(finished: Run, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(finished.folder, tmp_path / "run"))
    rounds = len(finished.records)
    with pytest.raises(
        TacitError, match=rf"cannot go back to round 1. It can go on after round {rounds - 1} or {rounds}"
    ):
        roll_back(folder, 1)
    assert check_run(folder) == []
    roll_back(folder, rounds - 1)
    assert len(Run(folder).records) == rounds - 1
    assert Run(folder).summary is None
    assert check_run(folder) == []
    seen: list[int] = []

    class Count(NullWatcher):
        def round_done(self, record: object) -> None:
            seen.append(record["step"])  # type: ignore[index]

    run_experiment(EXPERIMENT, folder, resume=True, watcher=Count())
    assert seen == [rounds - 1]
    assert outcome(folder) == outcome(finished.folder)


def test_more_checkpoints_reach_further_back(tmp_path: Path, finished: Run) -> None:
    experiment = resolve(EXPERIMENT.to_dict(), {"keep.checkpoints": 4, "keep.latest": 2})
    whole = run_experiment(experiment, tmp_path / "whole")
    folder = Path(shutil.copytree(whole.folder, tmp_path / "run"))
    rounds = len(whole.records)
    roll_back(folder, rounds - 3)
    run_experiment(experiment, folder, resume=True)
    assert outcome(folder) == outcome(whole.folder)


def test_memory_goes_back_with_the_run(tmp_path: Path) -> None:
    kept = ClientMemory(tmp_path, Keep(latest=1, checkpoints=3))
    for step in range(4):
        kept.forget(step)
        kept.write(step % 2, step, 0, {"x": step})
    kept.forget(4)
    assert kept.read(0, 4, 0) == {}  # only the latest client keeps
    kept.go_back(3)
    assert (kept.read(0, 3, 0), kept.read(1, 3, 0)) == ({"x": 2}, {"x": 1})
    kept.forget(3)
    assert (kept.read(0, 3, 0), kept.read(1, 3, 0)) == ({"x": 2}, {})
    kept.go_back(2)
    kept.forget(2)
    assert (kept.read(0, 2, 0), kept.read(1, 2, 0)) == ({}, {"x": 1})


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_any_changed_byte_in_a_payload_is_noticed(place: int, change: int) -> None:
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"tacit-test-{os.getpid()}.safetensors"
    content = {"n": 3, "x": 0.5, "model": {"w": torch.arange(6.0), "b": torch.tensor([True, False])}}
    try:
        found = payload.write(path, content)
        assert payload.digest_in(path) == found
        data = bytearray(path.read_bytes())
        data[place % len(data)] ^= change
        path.write_bytes(data)
        try:
            again, digest = payload.read_with_digest(path)
        except TacitError as error:
            refused = str(error)
        else:  # spaces that fill up the header say nothing
            assert digest == found
            assert torch.equal(again["model"]["w"], torch.arange(6.0))  # type: ignore[index]
            return
        assert path.name in refused
    finally:
        path.unlink()


def test_a_changed_lost_or_added_line_breaks_the_chain(tmp_path: Path) -> None:
    written = Manifest(tmp_path / "manifest.jsonl", [])
    for entry in ({"begin": {"returned": []}}, {"round": 0, "kept": {}}, {"round": 1, "kept": {}}, {"files": {}}):
        written.append(entry)
    lines = written.path.read_text().splitlines(keepends=True)

    def loaded(*lines: str) -> Manifest | None:
        written.path.write_text("".join(lines))
        return load_manifest(tmp_path)

    assert loaded(*lines).entries == written.entries  # type: ignore[union-attr]
    assert loaded(*lines, '{"round": 2, "ke').done == 2  # type: ignore[union-attr]  # cut off by a kill
    assert loaded(*lines[:2], lines[2].replace("1", "7", 1)).damaged == 3  # type: ignore[union-attr]
    assert loaded() is None
    for wrong in ([lines[0], *lines[2:]], [*lines[:2], lines[1], *lines[2:]], lines[1:], [lines[1], lines[0]]):
        with pytest.raises(TacitError, match=r"manifest\.jsonl is damaged in line \d"):
            loaded(*wrong)


def test_only_our_own_temporary_files_are_swept(copy: Path) -> None:
    left = [copy / ".tacit-tmp-123-split.npz", copy / "kept" / "client-0" / ".tacit-tmp-9-x@1-0.safetensors"]
    left += [copy / "checkpoint" / ".tacit-tmp-4-step-9.safetensors"]
    yours = [copy / ".notes.md", copy / ".x.y", copy / "checkpoint" / ".mine.1", copy / ".tacit-tmp-notes"]
    for path in [*left, *yours]:
        path.write_text("half")
    (copy / ".tacit-tmp-5-folder").mkdir()
    with pytest.raises(KeyboardInterrupt):
        run_experiment(EXPERIMENT, copy, resume=True, watcher=Stop(DONE + 1))
    assert not any(path.exists() for path in left)
    assert all(path.read_text() == "half" for path in yours)


def test_a_full_disk_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(TacitError, match=r"experiment\.toml cannot be written \(No space left on device\)\. Make room"):
        run_experiment(EXPERIMENT, tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.lock"]


def test_a_disk_that_fills_up_during_a_round(copy: Path, finished: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each write of a round in its turn: a sentence each time, and the run goes on from there."""
    real, turns, said = os.fsync, 0, []
    for fail_at in range(2, 30, 4):
        turns = 0

        def full(file: int, fail_at: int = fail_at) -> None:
            nonlocal turns
            turns += 1
            if turns == fail_at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(file)

        monkeypatch.setattr("os.fsync", full)
        try:
            run_experiment(EXPERIMENT, copy, resume=True)
        except TacitError as error:
            said.append("No space left on device" in str(error))
    monkeypatch.setattr("os.fsync", real)
    assert said
    assert all(said)
    run_experiment(EXPERIMENT, copy, resume=True)
    assert outcome(copy) == outcome(finished.folder)


def as_nobody(work: Callable[[], object]) -> str:
    """What happens to a user without any rights: in a process of its own, which has imported everything already."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgid(65534)
            os.setuid(65534)
            said = str(work())
        except TacitError as error:
            said = f"sentence: {error}"
        except BaseException as error:
            said = f"traceback: {type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as file:
        return file.read()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_wrong_permissions_are_a_sentence(mode: int, copy: Path) -> None:
    """Files and folders that belong to somebody else: not to be read, or not to be written."""
    things = ["rounds.jsonl", "manifest.jsonl", "split.npz", "experiment.toml", "checkpoint", "kept", "run.lock", "."]
    for parent in copy.parents:
        if "pytest" in parent.name or parent.name.startswith("test_"):
            parent.chmod(0o755)
    everything = [copy, *copy.rglob("*")]
    for what in things:
        for path in everything:
            os.chown(path, 65534, 65534)
        os.chown(copy / what, 0, 0)
        (copy / what).chmod(mode if (copy / what).is_dir() else mode & 0o644)
        said = as_nobody(lambda: run_experiment(EXPERIMENT, copy, resume=True, watcher=StopAtOnce()))
        stopped = said.startswith("traceback: KeyboardInterrupt")
        enough = mode & 0o004 and what in ("split.npz", "experiment.toml")  # it is only read
        assert said.startswith("sentence: ") or (enough and stopped), (what, said)
        (copy / what).chmod(0o755 if (copy / what).is_dir() else 0o644)


class StopAtOnce(NullWatcher):
    def start(self, plan: object, done: int) -> None:
        raise KeyboardInterrupt


def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("a file")
    with pytest.raises(TacitError, match="a file where a folder should be"):
        write_atomically(tmp_path / "folder" / "x", b"")
    (tmp_path / "x").mkdir()
    with pytest.raises(TacitError, match="a folder where a file should be"):
        write_atomically(tmp_path / "x", b"")
    with pytest.raises(ZeroDivisionError), atomic_path(tmp_path / "y") as new:
        new.write_bytes(b"half" * (1 // 0))
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "x"]


def test_check_run_on_the_command_line(copy: Path) -> None:
    from typer.testing import CliRunner

    from tacit.cli.app import complete

    good = CliRunner().invoke(complete(), ["check-run", str(copy)])
    assert (good.exit_code, "is as it was written (3 rounds)" in good.output) == (0, True)
    DAMAGES["flipped"](newest_checkpoint(copy))
    bad = CliRunner().invoke(complete(), ["check-run", str(copy)])
    assert bad.exit_code == 1
    assert newest_checkpoint(copy).name in bad.output
    assert json.loads((copy / "rounds.jsonl").read_text().splitlines()[0])["step"] == 0


def test_verdicts_are_not_always_kind(copy: Path, finished: Run) -> None:
    """The campaign itself: a run that ends with another result is told as such."""
    other = (outcome(finished.folder)[0], [])
    assert verdict(EXPERIMENT, copy, Path("x"), other) == "another result in silence"
