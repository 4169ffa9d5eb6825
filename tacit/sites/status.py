"""What `tacit site status` tells about a server or a site."""

import json
import time
from typing import Any

from rich.table import Table

from tacit.core.console import SafeConsole
from tacit.core.errors import TacitError
from tacit.core.formatting import size_text
from tacit.sites.approval import Approval
from tacit.sites.home import ServerHome, SiteHome
from tacit.sites.jobs import JobLog
from tacit.sites.keeper import is_listening
from tacit.sites.trail import TALK, place_of, read_trail, size_of


def tell_server(home: ServerHome, screen: SafeConsole) -> None:
    up = is_listening(home.local_address)
    screen.print(f"Server {home.folder}: {'listens' if up else 'does not listen'} on {home.bind}:{home.port}")
    known: dict[str, str] = {}
    if up:
        from tacit.sites.control import Control

        try:
            known = {site.name or str(site.node): site.status for site in Control(home).sites()}
        except TacitError as error:
            screen.print(str(error))
    table = Table("client", "site", "state", title="Sites")
    names = list(home.site_keys()) or list(known)
    for number, name in enumerate(names):
        table.add_row(str(number), name, known.get(name, "not registered" if up else "unknown"))
    screen.print(table if names else "No site has sent its key yet.")
    jobs = sorted((home.folder / "jobs").glob("*.jsonl"), key=lambda path: path.stat().st_mtime)
    for path in jobs[-5:]:
        screen.print(f"{_when(path.stat().st_mtime)}  {_story(path.with_suffix('.json'), JobLog(path))}")


def _story(path: Any, job_log: JobLog) -> str:
    """A job in a line."""
    job = json.loads(path.read_text())
    entries = job_log.read()
    rounds = [entry["round"] for entry in entries if "round" in entry]
    last = f", {rounds[-1]['stage']} round {rounds[-1]['round'] + 1}" if rounds else ""
    last = next((entry["say"] for entry in reversed(entries) if "say" in entry), "begun")
    end = next((f"failed: {entry['error'].strip().splitlines()[-1]}" for entry in entries if "error" in entry), "")
    done = "done" if any("done" in entry for entry in entries) else ""
    return f"{job['experiment']['method']['name']} → {job['out']}: {end or done or last}{last}"


def tell_site(home: SiteHome, screen: SafeConsole) -> None:
    up = is_listening(home.server)
    screen.print(f"Site {home.name}: the server {home.server} {'answers' if up else 'does not answer'}")
    for run in sorted((home.folder / "kept").glob("*")):
        size = sum(path.stat().st_size for path in run.rglob("*.safetensors"))
        screen.print(f"kept for run {run.name}: {size_text(size)}")
    entries = [entry for entry in read_trail(home.folder) if entry.get("kind", "train") not in TALK]
    total = size_text(sum(size_of(entry) for entry in entries))
    screen.print(f"{len(entries)} replies sent so far, {total}; `tacit site log` lists every message")
    for entry in entries[-5:]:
        when, run = entry.get("time", ""), entry.get("run", "")
        screen.print(f"  {when}  run {run}: {place_of(entry)}, {size_text(size_of(entry))}")
    if waiting := [job for job in Approval(home.folder).all() if job.state == "waiting"]:
        screen.print(f"{len(waiting)} jobs wait for a yes: `tacit site jobs` shows them")


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
