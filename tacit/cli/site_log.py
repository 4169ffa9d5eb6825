"""The commands by which a site's people see what left, and say which jobs may be worked on."""

import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from tacit.cli.options import console
from tacit.core.errors import TacitError
from tacit.core.formatting import size_text
from tacit.core.text import as_word, safe

SITE = Path("tacit-site")
Home = Annotated[Path, typer.Option(help="the folder with this site's keys and settings")]
JobName = Annotated[str, typer.Argument(metavar="JOB", help="a job's name (`tacit site jobs`), or its first letters")]


def show_log(
    run: Annotated[str, typer.Option(help="only the messages of this run (or whose name begins so)")] = "",
    verify: Annotated[
        bool, typer.Option("--verify", help="look whether a line was changed, removed or put in (exit code 1)")
    ] = False,
    head: Annotated[
        str, typer.Option(help="with --verify: a digest of the last line that was kept elsewhere at some time")
    ] = "",
    home: Home = SITE,
) -> None:
    """Every message that left this site: when, for what, what was in it, bytes, digest."""
    from tacit.sites.trail import FILE, head_of, problems, read_trail, size_of

    folder = _site_folder(home)
    if head and not verify:
        raise TacitError("--head is a digest to compare with: add --verify.")
    if verify:
        for line in (found := problems(folder, head.strip().lower())):
            console().print(f"{folder / FILE}: {line}")
        if found:
            raise typer.Exit(1)
        lines = len(read_trail(folder))
        console().print(f"{folder / FILE} is as it was written ({lines} messages). Its last digest: {head_of(folder)}")
        return
    entries = [entry for entry in read_trail(folder) if str(entry.get("run", "")).startswith(run)]
    table = Table("number", "time", "run", "job", "answer", "to", "what was in it", "bytes", "sha256")
    for entry in entries:
        table.add_row(*_row(entry))
    console().print(table if entries else "No message has left" + (f" for the run {safe(run)}." if run else "."))
    if entries:
        total = size_text(sum(size_of(entry) for entry in entries))
        console().print(
            f"{len(entries)} messages, {total}. Are the lines as they were written? tacit site log --verify"
        )


def _row(entry: dict[str, Any]) -> list[str]:
    from tacit.sites.trail import keys_of, names_in, place_of, size_of

    held = [*names_in(entry), *(["examples"] if "examples" in entry else []), *keys_of(entry, "metrics")]
    if "images" in entry:
        held = ["labels: yes or no", "number of images"]
    words = (
        str(entry.get("number", "–")),
        str(entry.get("time", "")),
        str(entry.get("run", ""))[:8],
        str(entry.get("job", ""))[:8],
        str(entry.get("kind", "train")),
        place_of(entry),
        str(entry.get("why", "")) or ", ".join(held) or "its name",
        f"{size_of(entry):,}",
        str(entry.get("sha256", ""))[:12],
    )
    return [safe(word, 200) for word in words]


def show_jobs(home: Home = SITE) -> None:
    """The jobs that servers asked this site for: which wait for a yes, and what was contributed to each."""
    from tacit.sites.approval import Approval
    from tacit.sites.trail import Counts, counted, read_trail

    folder = _site_folder(home)
    jobs, sent = Approval(folder).all(), counted(read_trail(folder))
    table = Table("job", "state", "since", "method", "rounds", "replies sent", "bytes sent")
    for job in jobs:
        counts = sent.get(job.job, Counts())
        words = (job.short, job.state, job.time, job.method, job.rounds, f"{counts.replies:,}", size_text(counts.bytes))
        table.add_row(*(safe(word, 100) for word in words))
    console().print(table if jobs else "No server has asked this site for anything yet.")
    for job in jobs:
        if job.state == "waiting":
            console().print(f"\n{job.text}\nTo decide: {_how(job.short, home)}")


def allow(job: JobName, home: Home = SITE) -> None:
    """Let this site work on a job that waits."""
    _decide(job, "allowed", home)


def deny(job: JobName, home: Home = SITE) -> None:
    """Refuse a job, from its next message on."""
    _decide(job, "denied", home)


def _decide(job: str, state: Any, home: Path) -> None:
    from tacit.sites.approval import Approval

    decided = Approval(_site_folder(home)).decide(job, state)
    console().print(f"Job {decided.short} ({safe(decided.method)}, {decided.rounds} rounds) is {decided.state}.")


def _site_folder(home: Path) -> Path:
    from tacit.sites.home import SiteHome, read_home

    found = read_home(home)
    if not isinstance(found, SiteHome):
        raise TacitError(f"{home} is the folder of a server; this command is for a site's.")
    return found.folder


def asker(home: Path) -> Callable[[Any], None]:
    """What `tacit site join --ask` does with a new job: it asks on the terminal or, without one, says how to decide.

    It asks in a thread, one job after the other: the site answers other messages meanwhile.
    """
    questions: queue.Queue[Any] = queue.Queue()
    started = threading.Event()

    def ask(job: Any) -> None:
        if not sys.stdin.isatty():
            console().print(f"\n{job.text}\nIt waits; the server asks again. To decide: {_how(job.short, home)}")
            return
        questions.put(job)
        if not started.is_set():
            started.set()
            threading.Thread(target=_read_answers, args=(questions, home), daemon=True).start()

    return ask


def _how(job: str, home: Path) -> str:
    return f"tacit site allow {job} --home {as_word(home)} (or deny)"


def _read_answers(questions: "queue.Queue[Any]", home: Path) -> None:
    while True:
        ask_on_terminal(questions.get(), home)


def ask_on_terminal(job: Any, home: Path) -> None:
    """Show a job and take down what is typed; where nobody types any more, it goes on waiting."""
    console().print(f"\n{job.text}\nTake part in it? Write yes or no (or elsewhere: {_how(job.short, home)}):")
    for line in iter(sys.stdin.readline, ""):
        word = line.strip().lower()
        if word in ("yes", "y", "no", "n"):
            try:
                _decide(job.job, "allowed" if word.startswith("y") else "denied", home)
            except TacitError as error:  # its file is gone, say: no reason to stop
                console().print(str(error))
            return
        console().print("Write yes or no:")


def register(app: typer.Typer) -> None:
    app.command("log", epilog="Example: `tacit site log --verify`")(show_log)
    app.command("jobs")(show_jobs)
    app.command(epilog="Example: `tacit site allow 3f2a9c`")(allow)
    app.command(epilog="Example: `tacit site deny 3f2a9c`")(deny)
