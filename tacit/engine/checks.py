"""What can be refused before a run begins: its folder, its backend, its settings."""

from pathlib import Path

from tacit.core.errors import TacitError
from tacit.core.paths import check_folder
from tacit.core.settings import Backend, Experiment
from tacit.engine.accounting import Release, check_installed, epsilon
from tacit.runs.checks import check_settings


def check_run(experiment: Experiment, out: Path) -> None:
    """Refuse a run that could not begin here: its folder, its backend, its settings."""
    check_folder(out)
    check_backend(experiment.backend)
    check_settings(experiment, out / "split.npz")
    check_budget(experiment)


def check_budget(experiment: Experiment) -> None:
    """Refuse a privacy budget that the first round would exceed already, and noise that cannot be accounted for."""
    settings = experiment.privacy
    check_installed(settings)
    if settings.epsilon is None:
        return
    among = experiment.data.clients
    once = epsilon(settings, [Release(among, experiment.participation.count(among), settings.noise)])
    if once is None or once > settings.epsilon:
        raise TacitError(
            f"privacy.epsilon = {settings.epsilon:g} is less than one round costs ({once:.3g}, with noise = "
            f"{settings.noise:g}): write more noise, or a larger epsilon."
        )


def check_backend(backend: Backend) -> None:
    """Refuse a backend that cannot run a simulation, or is not installed."""
    if backend.name == "flower":
        raise TacitError(
            "backend.name = 'flower' means real sites, and those are run with `tacit site run` (docs/sites.md). To "
            "simulate them here, write backend.name = 'pool'."
        )
    if backend.name == "ray":
        from tacit.backends.ray import connect  # an extra of its own

        connect(backend.address)
