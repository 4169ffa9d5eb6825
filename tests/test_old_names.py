"""Runs that an earlier version wrote are read under the names of today: nobody's run is lost."""

import json
from pathlib import Path

import pytest

from tacit.contract.record import KEYS, OLD_NAMES
from tacit.inference.notebook import NotebookRun
from tacit.report.collect import collect
from tacit.runs.folder import Run
from tacit.runs.integrity import check_run

NEW = {new: old for old, new in OLD_NAMES.items()}
EVIDENCE = Path(__file__).parent.parent / "evidence" / "runs"


def aged(run: Run) -> Run:
    """As an earlier version would have left it: old keys in the records and in the summary, and no manifest."""
    path = run.folder / "rounds.jsonl"
    lines = [{NEW.get(name, name): value for name, value in json.loads(line).items()} for line in path.open()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    path = run.folder / "summary.json"
    path.write_text(json.dumps({NEW.get(name, name): value for name, value in json.loads(path.read_text()).items()}))
    (run.folder / "manifest.jsonl").unlink()
    assert "kept_ratio" in path.read_text()
    return Run(run.folder)


def test_old_records_and_summaries_are_read_under_their_new_names(tiny) -> None:
    run = tiny("fixmatch", "clients")
    records, summary = run.records, run.summary
    old = aged(run)
    assert old.records == records
    assert old.summary == summary
    assert old["accepted_ratio"][-1] == records[-1]["accepted_ratio"]
    (shown,) = collect([run.folder])["runs"]
    assert shown["results"]["accepted_ratio"] == pytest.approx(summary["accepted_ratio"], abs=1e-4)
    assert "accepted" in NotebookRun(run.folder).card


def test_an_old_run_goes_on(tiny, tmp_path: Path) -> None:
    """Stopped after its first round by an earlier version; the records that come carry the new names."""
    from tacit.config.resolve import resolve
    from tacit.engine.run import run_experiment
    from tacit.runs.watchers import NullWatcher

    whole = tiny("fixmatch", "clients")

    class Stop(NullWatcher):
        def round_done(self, record: object) -> None:
            raise KeyboardInterrupt

    experiment = resolve(whole.experiment.to_dict())
    with pytest.raises(KeyboardInterrupt):
        run_experiment(experiment, tmp_path / "old", watcher=Stop())
    path = tmp_path / "old" / "rounds.jsonl"
    (line,) = path.open()
    path.write_text(json.dumps({NEW.get(name, name): value for name, value in json.loads(line).items()}) + "\n")
    (tmp_path / "old" / "manifest.jsonl").unlink()
    run = run_experiment(experiment, tmp_path / "old", resume=True)
    assert (run.folder / "model.safetensors").read_bytes() == (whole.folder / "model.safetensors").read_bytes()
    assert [r.get("accepted_ratio") for r in run.records] == [r.get("accepted_ratio") for r in whole.records]
    assert check_run(run.folder) == []


def test_the_evidence_of_earlier_versions_is_read() -> None:
    folders = sorted(path.parent for path in EVIDENCE.glob("*/summary.json"))
    assert len(folders) > 100
    for folder in folders[::10]:
        run = Run(folder)
        assert not OLD_NAMES.keys() & {name for record in [*run.records, run.summary] for name in record}
        run.experiment  # noqa: B018 (its settings are read, too)


def test_new_names_are_those_of_the_schema() -> None:
    assert {new.removesuffix("_std") for new in OLD_NAMES.values()} <= KEYS.keys()
