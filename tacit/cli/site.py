"""The commands for real sites: each party on its own machine, its images in its own folder."""

import shlex
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from tacit.cli.options import FromRound, Set, console, layers
from tacit.cli.site_log import asker
from tacit.cli.site_log import register as register_log
from tacit.core.errors import TacitError
from tacit.core.text import as_word
from tacit.evaluation.headline import headline

app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown")

Home = Annotated[Path, typer.Option(help="the folder with this server's or site's keys and settings")]
Insecure = Annotated[bool, typer.Option("--insecure", help="no TLS, no keys: to try things on this machine alone")]
DataOf = Annotated[Path, typer.Option("--data", help="this site's own images: a folder, a table or an .npz")]
Methods = Annotated[list[Path] | None, typer.Option("--method", help="a method file of your own that may be asked for")]
IgnoreLabels = Annotated[bool, typer.Option("--ignore-labels", help="use this site's images without their labels")]
PolicyFile = Annotated[
    Path | None, typer.Option("--policy", help="what this site allows (default: policy.toml in its folder, if there)")
]
SERVER, SITE = Path("tacit-server"), Path("tacit-site")


def _say(text: str) -> None:
    console().print(text)


@app.command("init-server", epilog="Example: `tacit site init-server --host hospital.example --port 8443`")
def init_server(
    host: Annotated[list[str] | None, typer.Option(help="a name or address by which sites reach it; repeat")] = None,
    bind: Annotated[str, typer.Option(help="the address it listens on (0.0.0.0: all of this machine's)")] = "",
    port: Annotated[str, typer.Option(help="the port it listens on", metavar="INTEGER")] = "8443",
    home: Home = SERVER,
    insecure: Insecure = False,
) -> None:
    """Make a server: a certificate authority, its certificate, a file of settings; tells what to copy where."""
    from tacit.sites import home as homes

    where = bind or ("127.0.0.1" if insecure or not host else "0.0.0.0")
    made = homes.init_server(home, tuple(host or ()), where, port, insecure)
    _say(f"Made {home}/ for a server on {made.bind}:{made.port}, reached as {', '.join(made.hosts)}.")
    if insecure:
        _say("INSECURE: no encryption and no keys. It works on this machine alone, for trying things out.")
    copy = (
        ""
        if insecure
        else (
            f"  2. Send {home / 'ca.crt'} to every site (it is not secret). Never send ca.key or server.key.\n"
            f"  3. Put the NAME.pub that each site sends you into {home / 'sites'}/. Make sure by another way\n"
            "     (a call) that it really comes from that site.\n"
        )
    )
    _say(
        f"What to do now:\n  1. Let the firewall pass port {port} from the sites.\n{copy}"
        f"  4. Start it and leave it running:   tacit site serve --home {as_word(home)}\n"
        f"  5. When all sites have joined:      tacit site run RECIPE --data FOLDER --home {as_word(home)}"
    )


@app.command("init-client", epilog="Example: `tacit site init-client north --server hospital.example:8443`")
def init_client(
    name: Annotated[str, typer.Argument(help="the name of this site")],
    server: Annotated[str, typer.Option(help="the server's name and port, as in hospital.example:8443")],
    home: Home = SITE,
    insecure: Insecure = False,
) -> None:
    """Make a site: a key pair and a file of settings; tells what to copy where. Run it at the site itself."""
    from tacit.sites import home as homes

    homes.init_site(home, name, server, insecure)
    _say(f"Made {home}/ for the site {name} of the server {server}.")
    if insecure:
        _say("INSECURE: no encryption and no keys. It works on this machine alone, for trying things out.")
    copy = (
        ""
        if insecure
        else (
            f"  1. Send {home / f'{name}.pub'} to the people of the server. Never send the file `key`: it stays here.\n"
            f"  2. Put the ca.crt that you get from them into {home}/.\n"
        )
    )
    _say(
        f"What to do now:\n{copy}"
        f"  3. See what would leave this site:  tacit site preview RECIPE --data FOLDER --home {as_word(home)}\n"
        f"  4. Take part, and leave it running: tacit site join --data FOLDER --home {as_word(home)}"
    )


@app.command()
def serve(home: Home = SERVER) -> None:
    """Run the server. Who may join is whose key lies in its folder `sites/`, at every moment."""
    from tacit.sites import keeper
    from tacit.sites.home import server_home

    found = server_home(home)
    _until_stopped(lambda stop: keeper.serve(_absolute(found), _say, stop))


@app.command(epilog="Example: `tacit site remove north`")
def remove(name: Annotated[str, typer.Argument(help="the name of the site")], home: Home = SERVER) -> None:
    """Take a site's key away: the server refuses it from its next call on. For the server's own machine."""
    from tacit.sites.home import remove_site, server_home

    found = server_home(home)
    remove_site(found, name)
    _say(
        f"{name} is removed: from now on its key is refused, in a running server, too, and a round that waits for it "
        f"goes on without it. To let it in again, copy its {name}.pub into {found.folder / 'sites'}/."
    )


@app.command()
def join(
    data: DataOf,
    home: Home = SITE,
    method: Methods = None,
    ignore_labels: IgnoreLabels = False,
    policy: PolicyFile = None,
    ask: Annotated[bool, typer.Option("--ask", help="show each new job, and wait for a yes of somebody here")] = False,
) -> None:
    """Take part with this site's images. They stay here; what is sent is told line by line."""
    from tacit.sites import keeper
    from tacit.sites.home import site_home

    found = site_home(home)
    keeper.needs_flower()
    site = _site(found, data, method, ignore_labels, policy, ask)
    site.trail.open()  # a list that was tampered with is told now
    _until_stopped(lambda stop: keeper.join(_absolute(found), site.respond, _say, stop))


def _site(
    found: Any, data: Path, method: list[Path] | None, ignore_labels: bool, policy: Path | None, ask: bool = False
) -> Any:
    from tacit.data.party import look
    from tacit.sites.policy import policy_of
    from tacit.sites.site import Settings, Site

    if not data.exists():
        raise TacitError(f"There is no {data}. Give this site's folder, table or .npz with --data.")
    if data.suffix.lower() != ".npz":
        look(data)  # what cannot be used says so now, not in the middle of a run
    own = tuple(path.resolve() for path in method or ())
    folder = found.folder.resolve()
    rules = policy_of(folder, policy, [path.name for path in own])
    settings = Settings(found.name, data.resolve(), folder, own, ignore_labels, policy=rules, ask=ask)
    return Site(settings, _say, asker(folder))


def _absolute(found: Any) -> Any:
    import dataclasses

    return dataclasses.replace(found, folder=found.folder.resolve())


def _until_stopped(work: Callable[[threading.Event], None]) -> None:
    """Until Ctrl-C or a termination signal; then everything that was started is ended, too."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    work(stop)
    _say("Stopped.")


@app.command(epilog="Example: `tacit site run demo-digits --data server-images --out runs/first`")
def run(
    recipe: Annotated[
        str, typer.Argument(help="a recipe (`tacit recipes`), a TOML file, or a run folder to repeat")
    ] = "",
    set_: Set = None,
    data: Annotated[
        Path | None, typer.Option(help="the server's own images: test images, labels if they are here")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="folder of the run (default: runs/NAME-seedN)")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on if a run is there, else start")] = False,
    sites: Annotated[str, typer.Option(help="the sites that take part, as in a,b,c (default: all in sites/)")] = "",
    wait: Annotated[float, typer.Option(help="seconds until every site must have joined")] = 300.0,
    patience: Annotated[float, typer.Option(help="seconds that a round waits for its last reply")] = 3600.0,
    largest_reply: Annotated[float, typer.Option(help="megabytes (0: four times what was sent, and one)")] = 0.0,
    without: Annotated[
        str, typer.Option(help="with --resume: sites that are not asked any more, as in a,b (the run remembers it)")
    ] = "",
    from_round: FromRound = None,
    home: Home = SERVER,
) -> None:
    """Run an experiment over the sites that have joined. For the server's own machine."""
    from tacit.config.resolve import resolve
    from tacit.runs.folder import Run, default_out
    from tacit.sites import keeper
    from tacit.sites.home import server_home
    from tacit.sites.jobs import Job
    from tacit.sites.server import SITES, roster_for, roster_of

    found = _absolute(server_home(home))
    names = tuple(sites.split(",")) if sites else tuple(found.site_keys())
    if not names:
        raise TacitError(f"No site is known: {home / 'sites'}/ holds no NAME.pub. (Insecure: name them with --sites.)")
    base, changes = layers(recipe, set_)
    own = {"backend.name": "flower", "data.clients": len(names), **({"data.name": str(data.resolve())} if data else {})}
    experiment = resolve(base, changes, own)
    folder = (out or default_out(recipe or Path(experiment.method["name"]).stem, experiment.seed)).resolve()
    if resume and not sites and (folder / SITES).is_file():  # a site that was left out may have no key here any more
        names = roster_of(folder).sites
        experiment = resolve(base, changes, own, {"data.clients": len(names)})
    if not Path(experiment.data.name).exists():
        raise TacitError(
            f"The server's data is '{experiment.data.name}', which is no folder or file here. Give the server's own "
            "images with --data (or a folder with facts.toml alone, if it has none)."
        )
    job = Job(
        experiment.to_dict(),
        str(folder),
        names,
        resume,
        wait,
        patience,
        int(largest_reply * 1e6),
        found.insecure,
        without=tuple(without.split(",")) if without else (),
        from_round=from_round,
    )
    roster_for(job)  # who cannot be left out is told here, before the server's process starts
    again = _again(recipe, set_, data, folder, sites, home)
    watch = _Watch()
    try:
        done = keeper.follow(keeper.submit(found, job, _say), found, watch)
    except KeyboardInterrupt:
        watch.stop()
        _say(f"\nStopped. All finished rounds are saved in {folder}. To go on:\n  {again}")
        raise typer.Exit(130) from None
    if not done:
        raise TacitError(
            "The run ended before it was done: the server was stopped, or the run was killed. All finished rounds are "
            f"saved in {folder}. Start the server again if need be, then go on with:\n  {again}"
        )
    summary = Run(folder).summary or {}
    if summary.get("accuracy") is not None:
        _say(f"{summary['method']}: {headline(summary, 2)} ({summary['reporting']})")
    _say(f"Written to {folder}")


def _again(recipe: str, settings: list[str] | None, data: Path | None, out: Path, sites: str, home: Path) -> str:
    words = ["tacit", "site", "run", *([recipe] if recipe else [])]
    words += [word for text in settings or [] for word in ("--set", text)]
    words += ["--data", str(data)] if data else []
    words += ["--sites", sites] if sites else []
    return shlex.join([*words, "--out", str(out), "--home", str(home), "--resume"])


class _Watch:
    """Shows the diary of a run, and remembers the process that does the work."""

    def __init__(self) -> None:
        self.process = 0

    def __call__(self, entry: dict[str, Any]) -> None:
        from tacit.runs.progress import figures

        self.process = int(entry.get("process", self.process))
        if "say" in entry:
            _say(str(entry["say"]))
        if "round" in entry:
            record = entry["round"]
            place = f"{record['stage']} round {record['round'] + 1}"
            _say(f"{place}  {figures(record)}  ({record['seconds']:.1f} s)")
            for refused in record["refused"]:
                _say(f"  without {refused['why']}")
            if record["skipped"]:
                _say(f"  {record['skipped']}")

    def stop(self) -> None:
        import os
        from contextlib import suppress

        if self.process:
            with suppress(ProcessLookupError):
                os.kill(self.process, signal.SIGTERM)


@app.command()
def status(home: Annotated[Path | None, typer.Option(help="the folder of the server or site")] = None) -> None:
    """Who is there, what is going on, what a site has kept and sent."""
    from tacit.sites.home import ServerHome, read_home
    from tacit.sites.status import tell_server, tell_site

    here = home or next((folder for folder in (SERVER, SITE) if folder.is_dir()), SERVER)
    found = read_home(here)
    if isinstance(found, ServerHome):
        tell_server(found, console())
    else:
        tell_site(found, console())


@app.command()
def preview(
    data: DataOf,
    recipe: Annotated[str, typer.Argument(help="the recipe that the server wants to run")] = "",
    set_: Set = None,
    facts: Annotated[
        Path | None, typer.Option(help="facts.toml of the federation (default: as this data tells)")
    ] = None,
    home: Home = SITE,
    method: Methods = None,
    ignore_labels: IgnoreLabels = False,
    policy: PolicyFile = None,
) -> None:
    """Train one round here and show what would leave this site, in names and bytes. Nothing is sent."""
    from tacit.config.resolve import resolve
    from tacit.sites.home import read_home
    from tacit.sites.preview import preview_site

    found = read_home(home)
    site = _site(found, data, method, ignore_labels, policy)
    preview_site(site, resolve(*layers(recipe, set_)), facts, console())


@app.command()
def rehearse(
    recipe: Annotated[str, typer.Argument(help="a recipe for a simulation")] = "",
    set_: Set = None,
    out: Annotated[Path, typer.Option(help="a new folder")] = Path("rehearsal"),
) -> None:
    """Write a simulated split out as folders, one for each party, to try sites with known data."""
    from tacit.config.resolve import resolve
    from tacit.runs.plan import prepare
    from tacit.sites.rehearse import write_parties

    for folder in write_parties(prepare(resolve(*layers(recipe, set_))), out):
        _say(str(folder))


register_log(app)
