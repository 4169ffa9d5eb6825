"""The papers' figures: numbers by hand, pictures from real runs."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from tacit.cli.figure import app
from tacit.core.errors import TacitError
from tacit.data.federation import load_dataset
from tacit.data.split import load_split
from tacit.evaluation.metrics import jensen_shannon
from tacit.papers.feddb_figures import Spread, bias_tracking, draw_bias, label_distributions
from tacit.pieces.debias import bias_of
from tacit.runs.folder import Run

Tiny = Callable[..., Run]


@pytest.fixture
def traced(tiny: Tiny) -> Run:
    return tiny("feddb", "clients", "traced", rounds=3, evaluate_clients=True, method__trace=True)


def test_spread() -> None:
    assert Spread.of([0.25, 0.75, 0.5]) == (0.5, 0.25, 0.75)


def test_label_distributions_count_labelled_images_only(traced: Run) -> None:
    counts = label_distributions(traced)
    split = load_split(traced.split_path)
    truth = load_dataset(traced.experiment.data).train_labels
    assert len(counts) == len(split.clients)
    for client, part in enumerate(split.clients):
        assert counts[client].tolist() == [int((truth[part.labeled] == one).sum()) for one in range(10)]


def test_bias_tracking_compares_each_client_with_its_own_figures(traced: Run) -> None:
    tracked = bias_tracking(traced)
    assert [one.round for one in tracked["local"]] == [0, 1, 2]
    assert [one.round for one in tracked["global"]] == [1, 2], "before the first round nothing was evaluated"
    record, before = traced.records[2], traced.records[1]
    client = record["answered"][-1]
    local = bias_of(torch.tensor(record["clients_per_class"][-1]))
    sent = bias_of(torch.tensor(before["per_class"]))
    labels = label_distributions(traced)[client]
    for spread, bias, other in (
        (tracked["local"][2].to_app_u, local, torch.tensor(record["app_u"][-1])),
        (tracked["local"][2].to_labels, local, labels),
        (tracked["global"][1].to_app_u, sent, torch.tensor(record["app_u_before"][-1])),
        (tracked["global"][1].to_labels, sent, labels),
    ):
        divergence = jensen_shannon(bias, other)
        assert spread.least - 1e-9 <= divergence <= spread.most + 1e-9
        assert 0 < spread.mean < 0.7


def test_the_command_draws_all_three(traced: Run, tiny: Tiny, tmp_path: Path) -> None:
    other = tiny("fixmatch", "clients", "other", rounds=2)
    for words in (
        ["bias", str(traced.folder)],
        ["classes", str(traced.folder), "--round", "1"],
        ["labels", str(traced.folder), str(other.folder)],
    ):
        picture = tmp_path / "pictures" / f"{words[0]}.png"
        result = CliRunner().invoke(app, [*words, "--out", str(picture)])
        assert result.exit_code == 0, result.output
        with Image.open(picture) as image:
            assert image.width > 300
            assert len(image.convert("RGB").getcolors(1_000_000) or []) > 20, "more than an empty page"


def test_a_run_without_the_figures_says_what_to_set(tiny: Tiny, tmp_path: Path) -> None:
    bare = tiny("feddb", "clients", rounds=1)
    with pytest.raises(TacitError, match=r"method\.trace=true"):
        draw_bias(bare, tmp_path / "bias.png")
    with pytest.raises(TacitError, match=r"method\.name=feddb"):
        draw_bias(tiny("fedavg", "clients", "plain", rounds=1), tmp_path / "bias.png")
