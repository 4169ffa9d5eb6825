"""What `tacit site status` tells about a server or a site."""

import json
import time
from typing import Any

from rich.table import Table

from tacit.core.console import SafeConsole
from tacit.core.errors import TacitError
from tacit.core.formatting import size_text
from tacit.sites.home import ServerHome, SiteHome
from tacit.sites.jobs import JobLog
from tacit.sites.keeper import is_listening


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
    sent = home.folder / "sent.jsonl"
    entries = [json.loads(line) for line in sent.read_text().splitlines()] if sent.is_file() else []
    total = size_text(sum(entry["bytes"] for entry in entries))
    screen.print(f"{len(entries)} replies sent so far, {total}; each is listed in {sent}")
    for entry in entries[-5:]:
        what = f"{entry['stage']} round {entry['round'] + 1}, {size_text(entry['bytes'])}"
        screen.print(f"  {entry['time']}  run {entry['run']}: {what}")


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
