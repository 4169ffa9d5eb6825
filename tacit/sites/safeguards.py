"""What [privacy] and [robust] change about what leaves a site, in sentences for its people."""

from tacit.core.settings import Experiment


def changes(experiment: Experiment) -> list[str]:
    """A sentence for each setting that is on, with what it does not protect from."""
    return [*_privacy(experiment), *_robust(experiment)]


def _privacy(experiment: Experiment) -> list[str]:
    settings = experiment.privacy
    if not settings.on:
        return []
    lines = [
        f"privacy.clip = {settings.clip:g}: an update that is longer is cut to this norm. Neither the number of "
        "examples nor the method's figures leave this site."
    ]
    if settings.where == "clients":
        lines.append(
            f'privacy.where = "clients": what leaves has this site\'s share of the noise in it ({settings.noise:g} '
            "times the clip over the square root of the clients asked; above for one client alone). The server sees "
            "each update with that share only; the promise is for the sum."
        )
        if settings.randomness == "seed":
            lines.append(
                'privacy.randomness = "seed": whoever knows the seed, and the server does, can take this noise off.'
            )
    else:
        lines.append(
            'privacy.where = "server": what leaves this site has no noise in it. The server adds it, and is trusted '
            "to: it protects from whoever sees the model, not from the server."
        )
    if not settings.noise:
        lines.append("privacy.noise = 0: nothing is promised.")
    return lines


def _robust(experiment: Experiment) -> list[str]:
    settings, lines = experiment.robust, []
    if settings.mean != "mean":
        lines.append(
            f'robust.mean = "{settings.mean}": the server compares the updates of single sites. It needs each of them '
            "in the clear; nothing else leaves than without it."
        )
    if settings.bounds:
        rule = "cut" if settings.out_of_bounds == "clip" else "refused"
        lines.append(
            f"[robust] bounds what counts at the server: beyond them a reply is {rule}. What leaves is the same."
        )
    return lines
