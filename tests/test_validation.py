"""Labelled images that parties keep back to judge models by: never learned, the same on every backend, and what the
best round is chosen by."""

from pathlib import Path

import numpy as np
import pytest
import torch
from test_sites import Here, at_sites, simulated

from runs import TINY, digest, timeless
from tacit.config.resolve import resolve
from tacit.core import payload
from tacit.core.errors import TacitError
from tacit.data.federation import Federation
from tacit.data.split import load_split, make_split
from tacit.engine.run import run_experiment
from tacit.engine.summary import best_round
from tacit.evaluation.scores import validation_figures
from tacit.pieces.train import predict
from tacit.runs.plan import prepare
from tacit.runs.watchers import NullWatcher
from tacit.sites.backend import NoResponse, read_tally
from tacit.sites.server import run_at_sites
from tacit.sites.wire import WHO, Response, pack

PLACEMENTS = ("server", "clients", "some-clients")
FIGURES = [f"validation_{name}" for name in ("accuracy", "balanced_accuracy", "loss", "images")]


def experiment(placement: str = "server", **more: object):
    changes = {"method.name": "fixmatch", "method.preset": "smoke", "data.placement": placement, "data.validation": 0.2}
    changes |= {"data.labels": 60, "data.labeled_clients": 2}
    return resolve(changes, TINY, more)


@pytest.mark.parametrize("reveal", ["none", "all"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_nobody_learns_what_is_kept_back(placement: str, reveal: str, tmp_path: Path) -> None:
    plan = prepare(experiment(placement, **{"data.reveal": reveal}))
    split, whole = plan.split, prepare(experiment(placement, **{"data.validation": 0.0})).split
    kept = np.concatenate(split.validation)
    learned = np.concatenate([split.server, *(a for part in split.clients for a in (part.labeled, part.unlabeled))])
    assert len(kept) > 0
    assert not np.isin(kept, learned).any()
    labeled = np.concatenate([whole.server, *(part.labeled for part in whole.clients)])
    assert np.isin(kept, labeled).all()  # also where all labels are revealed: the same images judge
    for client in range(-1, len(split.clients)):  # and they are their holder's own
        held = whole.server if client < 0 else whole.clients[client].labeled
        assert np.isin(split.kept_back(client), held).all()
    split.save(tmp_path / "split.npz")
    loaded = load_split(tmp_path / "split.npz")
    assert [part.tolist() for part in loaded.validation] == [part.tolist() for part in split.validation]


def test_a_saved_split_keeps_back_what_it_keeps_back(tmp_path: Path) -> None:
    plan = prepare(experiment())
    plan.split.save(tmp_path / "split.npz")
    asked = {"data.split": str(tmp_path / "split.npz")}
    again = make_split(plan.dataset, experiment(**asked).data, 5)
    assert [part.tolist() for part in again.validation] == [part.tolist() for part in plan.split.validation]
    with pytest.raises(TacitError, match=r"keeps back 0\.2 of the labels, but the experiment says validation = 0\."):
        make_split(plan.dataset, experiment(**asked, **{"data.validation": 0.0}).data, 5)


def test_no_label_can_be_kept_back() -> None:
    with pytest.raises(TacitError, match="keeps no image back"):
        prepare(experiment(**{"data.labels": 10, "data.validation": 0.5}))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_figures_are_those_of_the_images_kept_back_on_every_backend(placement: str, tmp_path: Path) -> None:
    asked = experiment(placement)
    local = run_experiment(resolve(asked.to_dict(), {"backend.name": "local"}), tmp_path / "local")
    pool = run_experiment(resolve(asked.to_dict(), {"backend.name": "pool", "backend.workers": 2}), tmp_path / "pool")
    assert timeless(pool) == timeless(local)
    plan = prepare(asked)
    federation = Federation(plan.dataset, plan.split, plan.setup.device)
    net = plan.setup.build()
    net.load_state_dict(local.weights)
    kept = [federation.validation(client) for client in range(-1, len(plan.split.clients))]
    images, labels = torch.cat([part.images for part in kept]), torch.cat([part.labels for part in kept])
    probs = predict(net, images, plan.setup.views.plain)
    last = local.records[-1]
    assert last["validation_images"] == len(labels) > 0
    assert last["validation_accuracy"] == pytest.approx((probs.argmax(1) == labels).double().mean().item())
    wanted = torch.nn.functional.nll_loss(probs.log(), labels).item()
    assert last["validation_loss"] == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_sites_judge_as_the_simulation_does(placement: str, tmp_path: Path) -> None:
    asked = simulated("fixmatch", placement, **{"data.validation": 0.3, "data.labels": 60})
    local = run_experiment(asked, tmp_path / "local")
    job, sites = at_sites(asked, tmp_path)
    here = Here(sites)
    run = run_at_sites(job, here, NullWatcher())
    assert digest(run) == digest(local)
    for mine, theirs in zip(run.records, local.records, strict=True):
        assert [mine[name] for name in FIGURES] == [theirs[name] for name in FIGURES]
    judged = [answer for ask, answer in here.seen if b'"kind": "judge"' in ask]
    assert bool(judged) == (placement != "server")
    assert all(len(answer) < 2000 for answer in judged)  # three numbers a class, and a header


def test_a_site_that_does_not_judge_is_not_waited_for_again(tmp_path: Path) -> None:
    asked = simulated("fixmatch", "clients", **{"data.validation": 0.3, "data.labels": 60})
    job, sites = at_sites(asked, tmp_path)

    class Deaf(Here):
        def request(self, envelopes, patience, done):
            deaf = {name for name, envelope in envelopes.items() if name == "site-1" and b'"kind": "judge"' in envelope}
            heard = super().request({name: e for name, e in envelopes.items() if name not in deaf}, patience, done)
            return heard | dict.fromkeys(deaf, NoResponse("no answer"))

    here = Deaf(sites)
    run = run_at_sites(job, here, NullWatcher())
    assert all(record["answered"] == [0, 1, 2] for record in run.records)  # it says its name, and is asked again
    whole = run_experiment(asked, tmp_path / "local").records
    assert all(
        0 < mine["validation_images"] < its["validation_images"] for mine, its in zip(run.records, whole, strict=True)
    )
    assert sum(envelope == WHO for envelope, _ in here.seen) > 0


def test_a_tally_that_cannot_be_one_is_left_out() -> None:
    good = torch.tensor([[2.0, 3.0], [1.0, 3.0], [0.5, 0.1]], dtype=torch.float64)

    def told(tensor: torch.Tensor, **header: object) -> float:
        answer = pack(Response(**{"kind": "judge", "client": 1, **header}), payload.to_bytes({"tally": tensor}))
        return float(read_tally(answer, 1, 2, 5.0).sum())

    assert told(good) == pytest.approx(float(good.sum()))
    bad = [-good, good * torch.nan, good[:2], good[[1, 0, 2]], good * 2]
    assert [told(tensor) for tensor in bad] == [0.0] * len(bad)
    assert told(good, client=0) == told(good, kind="train") == 0.0
    assert float(read_tally(b"nothing", 1, 2, 5.0).sum()) == 0.0


def test_no_images_no_figures() -> None:
    assert validation_figures(torch.zeros(3, 2)) == {}


def test_the_best_round_by_what_was_kept_back(tmp_path: Path) -> None:
    run = run_experiment(experiment(reporting="best", best_by="loss", rounds=4, **{"train.lr": 0.5}), tmp_path / "run")
    records = [record for record in run.records if record["stage"] == "main"]
    best = min(records, key=lambda record: record["validation_loss"])
    assert run.summary is not None
    assert run.summary["best_by"] == "loss"
    assert run.summary["reported_rounds"] == [best["round"]]
    assert run.summary["accuracy"] == best["accuracy"]
    assert best_round(records, "loss") is best


def test_the_best_model_is_handed_over_also_after_a_stop(tmp_path: Path) -> None:
    """The rate is so high that the last round is not the best one."""
    asked = experiment(reporting="best", best_by="accuracy", rounds=5, **{"train.lr": 2.0})

    class Stop(NullWatcher):
        def round_done(self, record) -> None:
            if record["stage"] == "main" and record["round"] == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_experiment(asked, tmp_path / "run", watcher=Stop())
    run = run_experiment(asked, tmp_path / "run", resume=True)
    records = [record for record in run.records if record["stage"] == "main"]
    best = best_round(records, "accuracy")
    assert best["round"] < 4  # or this shows nothing
    shorter = run_experiment(resolve(asked.to_dict(), {"rounds": best["round"] + 1}), tmp_path / "shorter")
    assert digest(run) == digest(shorter)


def test_what_cannot_be_judged_by_is_refused() -> None:
    with pytest.raises(TacitError, match=r"needs labelled images that are kept back: write validation = 0\.2"):
        resolve({"reporting": "best", "best_by": "loss"})
    with pytest.raises(TacitError, match='best_by = "loss" is for reporting = "best"'):
        resolve({"best_by": "loss", "data.validation": 0.2})
