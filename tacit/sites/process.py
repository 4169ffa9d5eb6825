"""Flower's own processes, started as they should be: without telemetry, behind two doors that Flower leaves open.

- The server's port answers three kinds of calls. Sites need one of them, and it asks for a key. The other two (start
  any code, take work) ask for nothing, so here they are answered to this machine alone.
- A site would run whatever app a server sends. Here it runs tacit's own app, as installed at the site, and no other.

Run as `python -m tacit.sites.process superlink|supernode …`. Everything that reaches into Flower is in this file.
"""

import io
import ipaddress
import os
import sys
import threading
import tomllib
import zipfile
from collections.abc import Awaitable, Callable
from importlib import resources
from pathlib import Path
from typing import Any

HEARTBEAT = 10  # seconds, the least that Flower allows: a site that died may come back after twice that
START_SERVER, START_SITE = 300, 60  # seconds that a process of Flower's may need to begin; on a busy machine its 30
# are not enough, and it would start another one, and another
APP_FILES = ("pyproject.toml", "tacit_site/__init__.py", "tacit_site/client_app.py", "tacit_site/server_app.py")

Scope = dict[str, Any]
Application = Callable[[Scope, Any, Any], Awaitable[None]]


def is_loopback(host: str) -> bool:
    """
    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("10.0.0.7"), is_loopback("0.0.0.0")
    (True, True, False, False)
    """
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def environment(home: Path, **more: str) -> dict[str, str]:
    """The environment of Flower's processes: nothing is reported to anybody, files stay in the home folder."""
    beside = str(Path(sys.executable).parent)  # Flower starts its helpers by their names
    own = {
        "FLWR_HOME": str(home / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PATH": beside + os.pathsep + os.environ.get("PATH", ""),
    }
    return {**os.environ, **own, **more}


def own_app() -> dict[str, bytes]:
    """The files of the Flower app that came with this tacit."""
    top = resources.files("tacit.sites") / "app"
    return {name: (top / name).read_bytes() for name in APP_FILES}


def same_app(bundle: bytes) -> bool:
    """Whether a bundle from the server holds tacit's own app and not one file more."""
    try:
        with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
            sizes = {info.filename: info.file_size for info in archive.infolist()}
            code = [name for name in sizes if not name.startswith(".info/") and name != "pyproject.toml"]
            own = own_app()
            if sorted(code) != sorted(name for name in own if name != "pyproject.toml"):
                return False
            if any(sizes[name] != len(own[name]) or archive.read(name) != own[name] for name in code):
                return False
            if sizes["pyproject.toml"] > 100_000:
                return False
            sent, here = (
                tomllib.loads(text.decode()) for text in (archive.read("pyproject.toml"), own["pyproject.toml"])
            )
            return bool(sent["tool"]["flwr"]["app"]["components"] == here["tool"]["flwr"]["app"]["components"])
    except (zipfile.BadZipFile, KeyError, ValueError, TypeError, RuntimeError, NotImplementedError):
        return False


def guarded(application: Application) -> Application:
    """Calls from other machines reach what sites need and nothing else."""

    async def guard(scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and not scope["path"].startswith("/v1/fleet/") and not _from_here(scope):
            await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"tacit: only from the server's own machine\n"})
            return
        await application(scope, receive, send)

    return guard


def _from_here(scope: Scope) -> bool:
    client, server = scope.get("client"), scope.get("server")
    return client is not None and (is_loopback(client[0]) or (server is not None and client[0] == server[0]))


def superlink() -> None:
    from flwr.superlink import main
    from flwr.superlink.cli.flower_superlink import flower_superlink

    _time_to_start(START_SERVER)
    flower: Any = main
    create = flower.create_app
    flower.create_app = lambda *given: guarded(create(*given))
    flower_superlink()


def supernode() -> None:
    from flwr.supercore import heartbeat
    from flwr.supercore.run import RunNotRunningException
    from flwr.supernode import fleet_http_connection
    from flwr.supernode.cli.flower_supernode import flower_supernode

    _time_to_start(START_SITE)
    connection: Any = fleet_http_connection
    read = connection.fab_from_proto

    def only_ours(given: Any) -> Any:
        bundle = read(given)
        if not same_app(bundle.content):
            print("tacit: the server sent an app that is not tacit's own. It was not run.", flush=True)
            raise RunNotRunningException  # Flower leaves a message alone whose run is over
        return bundle

    connection.fab_from_proto = only_ours
    beat: Any = heartbeat
    connection.HEARTBEAT_DEFAULT_INTERVAL = beat.HEARTBEAT_DEFAULT_INTERVAL = HEARTBEAT
    flower_supernode()


def _time_to_start(seconds: int) -> None:
    from flwr.supercore.corestate import in_memory_corestate, sql_corestate

    memory: Any = in_memory_corestate
    database: Any = sql_corestate
    memory.HEARTBEAT_DEFAULT_INTERVAL = database.HEARTBEAT_DEFAULT_INTERVAL = seconds


def end_with_parent() -> None:
    """Whoever started this process holds the other end of its standard input: when that closes, it ends."""

    def wait() -> None:
        while os.read(0, 1):  # not sys.stdin: its lock would be in the way of a clean end
            pass
        os.kill(os.getpid(), 15)
        threading.Timer(5.0, lambda: os._exit(1)).start()

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    end_with_parent()
    which = sys.argv.pop(1)
    {"superlink": superlink, "supernode": supernode}[which]()
    sys.stdout.flush()
    os._exit(1)  # a lost connection ends Flower's work, but its web server would keep the process
