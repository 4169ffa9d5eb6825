"""Every mistake in an experiment is told before any work, with what to write instead."""

from pathlib import Path

import pytest

from tacit.config.resolve import resolve
from tacit.core.errors import TacitError
from tacit.core.machine import pick_device
from tacit.core.settings import Experiment, differences, known_keys, parse_setting, read_toml

MISTAKES = [
    ({"data.alhpa": 0.1}, "There is no setting 'data.alhpa'. Did you mean 'data.alpha'?"),
    ({"lr": 0.1}, "There is no setting 'lr'. Did you mean 'train.lr'?"),
    ({"data.alpha": -1}, "data.alpha = -1: input should be greater than or equal to 0.000001."),
    ({"data.alpha": "big"}, "alpha = 'big' is not a number"),
    ({"rounds": 2.5}, "rounds = 2.5: input should be a valid integer"),
    ({"data.placement": "severs"}, "Did you mean 'server'? Write one of: server, clients, some-clients."),
    ({"net.norm": "ln"}, "net.norm = 'ln' is not a choice."),
    ({"method.name": "fixmach"}, "There is no method 'fixmach'. Did you mean 'fixmatch'?"),
    ({"method.preset": "papr"}, "FedAvg has no preset 'papr'. Did you mean 'paper'?"),
    ({"method.name": "fixmatch", "method.treshold": 0.9}, "has no option 'method.treshold'. Did you mean 'threshold'?"),
    (
        {"method.name": "fedavg", "method.threshold": 0.9},
        "FedAvg has no option 'method.threshold' (it has: plus, ",
    ),
    ({"method.name": "fedavg", "method.threshold": 0.9}, "move it from [method] into a table [method.fixmatch]"),
    ({"method.fixmtch.threshold": 0.9}, "there is no method 'fixmtch'. Did you mean 'fixmatch'?"),
    ({"method.fixmatch.treshold": 0.9}, "fixmatch has no option 'treshold'. Did you mean 'threshold'?"),
    ({"method.name": "fixmatch", "method.threshold": 1.5}, "method.threshold = 1.5: input should be less than or"),
    ({"method.name": "fixmatch", "method.labels": "rond"}, "Did you mean 'round'? Write one of: batch, round."),
    (
        {"data.placement": "some-clients", "data.labeled_clients": 11},
        "labeled_clients is 11, but there are only 10 clients; write labeled_clients = 10 or fewer",
    ),
    ({"seed.x": 1, "seed": 1}, "is a value, not a table"),
    ({"method": 5}, "method = 5 is not a name"),
    ({"method.preset": [1]}, "method.preset = [1] is not a name"),
    ({"rounds": True}, "rounds = True is not a number"),
    ({"train.epochs": "3"}, "epochs = '3' is not a number; write it without quotes"),
    ({"train.lr": float("inf")}, "train.lr = inf: input should be a finite number"),
    ({"participation.quorum": 99}, "participation.quorum is 99, but only 10 clients are asked"),
]


@pytest.mark.parametrize(("settings", "message"), MISTAKES, ids=[" ".join(s) for s, _ in MISTAKES])
def test_mistakes_are_explained(settings: dict, message: str) -> None:
    with pytest.raises(TacitError) as caught:
        resolve({"seed": 1}, settings) if "seed.x" not in settings else resolve({"seed": 1}, {"seed.x": 1})
    assert message in str(caught.value)


def test_layers_and_presets() -> None:
    smoke = resolve({"method": {"name": "fixmatch", "preset": "smoke"}})
    assert smoke.rounds == 2
    assert smoke.method["warmup"] == 1
    above = resolve({"method": {"name": "fixmatch", "preset": "smoke"}, "rounds": 7}, {"method.warmup": 3})
    assert (above.rounds, above.method["warmup"], above.data.clients) == (7, 3, 4)


def test_a_table_of_a_method_counts_where_that_method_is_chosen() -> None:
    file = {"method": {"name": "fixmatch", "fixmatch": {"threshold": 0.7, "warmup": 3}}}
    assert resolve(file).method["threshold"] == 0.7
    assert resolve(file, {"method.threshold": 0.8}).method["threshold"] == 0.8
    assert resolve({"method": {**file["method"], "warmup": 4}}).method["warmup"] == 4  # before its table
    for lower in ({"method.name": "fedavg"}, {"method": "fedavg"}):
        assert "threshold" not in resolve(file, lower).method
    assert resolve(resolve(file).to_dict()) == resolve(file)


def test_a_resolved_experiment_resolves_to_itself(tmp_path: Path) -> None:
    first = resolve({"method": {"name": "fixmatch", "preset": "smoke"}, "paper": {"accuracy": 1.5, "source": "x"}})
    path = tmp_path / "experiment.toml"
    path.write_text(first.to_toml())
    assert resolve(read_toml(path)) == first
    assert differences(first, resolve(read_toml(path))) == []


def test_differences_leave_out_what_changes_nothing() -> None:
    old, new = resolve({"backend.workers": 1}), resolve({"backend.workers": 2, "seed": 3})
    assert differences(old, new) == ["seed: 0 in the run, 3 now"]


def test_settings_from_the_command_line() -> None:
    assert parse_setting("data.name=./my images") == ("data.name", "./my images")
    assert parse_setting("seed=3") == ("seed", 3)
    assert parse_setting('data.name="digits"') == ("data.name", "digits")
    with pytest.raises(TacitError, match="key=value"):
        parse_setting("seed")


def test_files_that_are_not_toml(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("seed = = 1")
    with pytest.raises(TacitError, match=r"bad\.toml is not valid TOML: .*line 1"):
        read_toml(path)


def test_every_key_is_described() -> None:
    undescribed = []
    for key in known_keys():
        *path, last = key.split(".")
        model = Experiment
        for part in path:
            model = model.model_fields[part].annotation  # type: ignore[assignment]
        if model.model_fields[last].description is None:
            undescribed.append(key)
    assert set(undescribed) <= {
        "seed",
        "train.momentum",
        "train.nesterov",
        "train.weight_decay",
        "method",
        "paper.accuracy",
        "paper.auc",
        "paper.source",
    }


def test_devices() -> None:
    assert pick_device("cpu").type == "cpu"
    with pytest.raises(TacitError, match="is not a device"):
        pick_device("gpu7")
    for absent in ("cuda:99", "meta", "xpu"):
        with pytest.raises(TacitError, match="there is no such device here"):
            pick_device(absent)


def test_files_are_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("from tacit.methods.fedavg import FedAvg\nclass Own(FedAvg):\n    pass\n")
    assert resolve({"method.name": "./own.py"}).method["name"] == str(tmp_path / "own.py")
    (tmp_path / "own.py").write_text("def (:")
    with pytest.raises(TacitError, match=r"own\.py cannot be loaded: SyntaxError"):
        resolve({"method.name": "./own.py"})
    (tmp_path / "digits").mkdir()
    assert resolve({"data.name": "digits"}).data.name == "digits"  # a source keeps its name
