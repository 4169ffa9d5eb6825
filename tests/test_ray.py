"""On a local Ray cluster with two workers: the same bytes as in one process, also after a stop."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runs import TINY, digest, timeless
from tacit.backends.ray import connect
from tacit.config.resolve import resolve
from tacit.core.errors import TacitError
from tacit.core.settings import Experiment
from tacit.engine.run import run_experiment
from tacit.runs.watchers import NullWatcher

try:
    ray = connect("")  # as a run does, with a token of its own
except TacitError as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """One cluster for all tests here; a run uses the one that is there."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


def smoke(name: str, placement: str, **settings: object) -> Experiment:
    changes = {key.replace("__", "."): value for key, value in settings.items()}
    return resolve({"method.name": name, "method.preset": "smoke", "data.placement": placement}, TINY, changes)


@pytest.mark.usefixtures("cluster")
def test_ray_is_local_also_after_a_stop(tmp_path: Path) -> None:
    kept = {"data__validation": 0.2, "data__labels": 60, "guard__on": True}  # the twin's two rounds come first
    local = run_experiment(smoke("bsemifl", "server", **kept), tmp_path / "local")
    on_ray = smoke("bsemifl", "server", **kept, backend__name="ray", backend__workers=2)

    class Stop(NullWatcher):
        def client_done(self, round_info: object, done: int, asked: int) -> None:
            if round_info.step == 3 and done == 2:  # type: ignore[attr-defined]
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_experiment(on_ray, tmp_path / "ray", watcher=Stop())
    resumed = run_experiment(on_ray, tmp_path / "ray", resume=True)
    assert digest(resumed) == digest(local)
    assert timeless(resumed) == timeless(local)


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    "safeguards",
    [
        {"privacy__clip": 1.0, "privacy__noise": 1.0, "privacy__where": "clients", "privacy__sampling": "fixed"},
        {"robust__mean": "median", "robust__norm_quantile": 0.5, "faults__attackers": 1},
    ],
    ids=["privacy", "robust"],
)
def test_safeguards_are_the_same_on_ray(safeguards: dict[str, object], tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    local = run_experiment(smoke("fedavg", "clients", **safeguards), tmp_path / "local")
    on_ray = smoke("fedavg", "clients", **safeguards, backend__name="ray", backend__workers=2)
    ray_run = run_experiment(on_ray, tmp_path / "ray")
    assert (digest(ray_run), timeless(ray_run)) == (digest(local), timeless(local))


@pytest.mark.usefixtures("cluster")
def test_gpus_that_are_not_there_are_refused(tmp_path: Path) -> None:
    wanting = smoke("fedavg", "server", backend__name="ray", backend__gpus=0.5)
    with pytest.raises(TacitError, match=r"backend.gpus is 0.5 a worker, but the cluster has 0 GPUs"):
        run_experiment(wanting, tmp_path / "run")


@pytest.mark.usefixtures("cluster")
def test_ray_takes_nothing_from_who_has_another_token() -> None:
    join = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False); print('joined')"
    words = [sys.executable, "-c", join, ray.get_runtime_context().gcs_address]
    stranger = subprocess.run(
        words,
        env={**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert stranger.returncode != 0
    assert "joined" not in stranger.stdout
    assert "token" in (stranger.stdout + stranger.stderr).lower()
