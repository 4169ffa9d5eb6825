"""Flower's own processes, started as they should be: without telemetry, and without the doors that Flower leaves open.

- The server's port stands behind a guard (guard.py): sites by their keys, the server's own processes by a secret.
- The server runs tacit's own app, by its digest, and no other; so does a site, as installed there.
- A site signs every call whole, not the time alone, and opens no port: its processes talk over a socket file in a
  folder that only its user can enter.
- Flower starts its helpers by their names; here they are started through this file, so that all of this holds in them.

Run as `python -m tacit.sites.process superlink|supernode|superexec|serverapp|clientapp …`. Everything that reaches
into Flower is in this file.
"""

import hashlib
import io
import os
import subprocess
import sys
import threading
import tomllib
import types
import zipfile
from importlib import import_module, resources
from pathlib import Path
from typing import Any

from tacit.core.text import safe_lines
from tacit.sites.guard import (
    OTHER_CLOCK,
    SECRET,
    TIMESTAMP,
    UNKNOWN_KEY,
    Application,
    Guard,
    Limits,
    signature_headers,
)
from tacit.sites.jobs import HOME
from tacit.sites.relay import SOCKET

HEARTBEAT = 10  # seconds, the least that Flower allows: a site that died may come back after twice that
START_SERVER, START_SITE = 300, 60  # seconds that a process of Flower's may need to begin; on a busy machine its 30
# are not enough, and it would start another one, and another
LOOK_SERVER, LOOK_SITE = "1.0", "0.25"  # seconds between looks for work: once a run at the server, once a message here
PIECE = 5 << 20  # bytes of a message that go in one call
APP_FILES = ("pyproject.toml", "tacit_site/__init__.py", "tacit_site/client_app.py", "tacit_site/server_app.py")
HELPERS = {"flower-superexec": "superexec", "flwr-serverapp": "serverapp", "flwr-clientapp": "clientapp"}


def environment(home: Path, **more: str) -> dict[str, str]:
    """The environment of Flower's processes: nothing is reported to anybody, files stay in the home folder."""
    own = {
        "FLWR_HOME": str(home / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": LOOK_SERVER if HOME in more else LOOK_SITE,
        "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE": str(PIECE),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    return {**os.environ, **own, **more}


# --- The one app ------------------------------------------------------------------------------------------


def own_app() -> dict[str, bytes]:
    """The files of the Flower app that came with this tacit."""
    top = resources.files("tacit.sites") / "app"
    return {name: (top / name).read_bytes() for name in APP_FILES}


def own_bundle() -> bytes:
    """The same files as Flower packs them; the same bytes every time."""
    from flwr.cli.build import build_fab_from_files

    return bytes(build_fab_from_files(own_app())[0])


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


def start_run_refusal(body: bytes) -> str:
    """Why a run is not started: it is of another app than the one in this tacit (empty: it is that one)."""
    from flwr.proto.control_pb2 import StartRunRequest

    request = StartRunRequest()
    try:
        request.ParseFromString(body)
    except Exception:  # whatever a parser of strange bytes raises
        return "tacit: no request to start a run"
    own = hashlib.sha256(own_bundle()).digest()
    if request.app_spec or hashlib.sha256(request.fab.content).digest() != own:
        return (
            "tacit: this server runs the app of its own tacit and no other. If tacit was updated, stop `tacit site "
            "serve` and start it again"
        )
    return ""


def _install_only(module: Any) -> None:
    """In a process that runs an app: look again at what is about to be installed and run."""
    install = module.install_from_fab

    def only_ours(content: bytes, *given: Any, **more: Any) -> Any:
        if not same_app(content):
            raise RuntimeError("tacit: an app that is not tacit's own. It was not run.")
        return install(content, *given, **more)

    module.install_from_fab = only_ours


# --- Flower's processes -----------------------------------------------------------------------------------


def superlink() -> None:
    import uvicorn

    from tacit.sites.home import server_home

    home = server_home(Path(os.environ[HOME]))
    _time_to_start(START_SERVER)
    _keys_may_return()
    flower: Any = import_module("flwr.superlink.main")
    create = flower.create_app

    def guarded(*given: Any) -> Application:
        return Guard(
            create(*given),
            home.secret(),
            None if home.insecure else home.keys(),
            limits=Limits(reply=home.largest_reply_mb * 1_000_000),
            start_run_refusal=start_run_refusal,
            say=lambda text: print(safe_lines(f"tacit: {text}"), flush=True),
        )

    flower.create_app = guarded
    command: Any = import_module("flwr.superlink.cli.flower_superlink")
    # h11 bounds the headers of a call, which the faster parser does not; nobody needs web sockets.
    run = uvicorn.run
    command.uvicorn = types.SimpleNamespace(
        run=lambda **given: run(**{**given, "http": "h11", "ws": "none", "access_log": False})
    )
    _start_helpers_here(command)
    command.flower_superlink()


def supernode() -> None:
    import uvicorn
    from flwr.supercore.run import RunNotRunningException

    _time_to_start(START_SITE)
    connection: Any = import_module("flwr.supernode.fleet_http_connection")
    read = connection.fab_from_proto

    def only_ours(given: Any) -> Any:
        bundle = read(given)
        if not same_app(bundle.content):
            print("tacit: the server sent an app that is not tacit's own. It was not run.", flush=True)
            raise RunNotRunningException  # Flower leaves a message alone whose run is over
        return bundle

    connection.fab_from_proto = only_ours
    connection.NodeAuthHttpInterceptor = _signer(connection.NodeAuthHttpInterceptor)
    beat: Any = import_module("flwr.supercore.heartbeat")
    connection.HEARTBEAT_DEFAULT_INTERVAL = beat.HEARTBEAT_DEFAULT_INTERVAL = HEARTBEAT
    command: Any = import_module("flwr.supernode.cli.flower_supernode")
    configure = uvicorn.Config
    command.uvicorn = types.SimpleNamespace(
        Server=uvicorn.Server, Config=lambda **given: configure(**{**given, "uds": str(_inner_socket())})
    )
    _start_helpers_here(import_module("flwr.supernode.start_client_internal"))
    command.flower_supernode()


def superexec() -> None:
    from flwr.supercore.cli import flower_superexec

    _call_the_parent()
    _start_helpers_here(import_module("flwr.supercore.superexec.executor.subprocess_executor"))
    flower_superexec()


def serverapp() -> None:
    from flwr.superlink.cli import flwr_serverapp

    _call_the_parent()
    _install_only(import_module("flwr.superlink.runtime.run_serverapp"))
    flwr_serverapp()


def clientapp() -> None:
    from flwr.supernode.cli import flwr_clientapp

    _call_the_parent()
    _install_only(import_module("flwr.supernode.runtime.run_clientapp"))
    flwr_clientapp()


def _signer(plain: Any) -> Any:
    """Flower's interceptor signs the time; this one signs the whole call as well."""
    from flwr.supercore.primitives.asymmetric import sign_message

    class Signer(plain):
        def intercept(self, context: Any, call_next: Any) -> Any:
            def signed(context: Any) -> Any:
                call = context.request
                call.headers.update(
                    signature_headers(
                        lambda text: bytes(sign_message(self._private_key, text)),
                        call.method,
                        call.url.path,
                        call.headers[TIMESTAMP],
                        call.content,
                    )
                )
                return call_next(context)

            response = super().intercept(context, signed)
            for reason in (UNKNOWN_KEY, OTHER_CLOCK):  # Flower ends without a word
                if response.status_code == 401 and reason in response.text[:1000]:
                    print(safe_lines(reason), flush=True)
            return response

    return Signer


def with_secret(secret: str) -> Any:
    """An interceptor for Flower's clients that shows the server's secret."""

    class WithSecret:
        def intercept(self, context: Any, call_next: Any) -> Any:
            context.request.headers[SECRET] = secret
            return call_next(context)

    return WithSecret()


def _inner_socket() -> Path:
    """Where a site's processes talk to each other: beside the socket of the process that has the data."""
    return Path(os.environ[SOCKET]).with_name("flower")


def _call_the_parent() -> None:
    """In a helper: reach the process that started it, by a secret at the server, by a socket file at a site."""
    import httpx
    from flwr.supercore.protobuf import client

    from tacit.sites.home import server_home

    base: Any = client.ProtobufClient
    start = base.__init__

    def here(self: Any, *given: Any, **more: Any) -> None:
        start(self, *given, **more)
        if SOCKET in os.environ:
            timeout = self._client.timeout
            self._client.close()
            self._client = httpx.Client(transport=httpx.HTTPTransport(uds=str(_inner_socket())), timeout=timeout)
        else:
            self._interceptors = (*self._interceptors, with_secret(server_home(Path(os.environ[HOME])).secret()))

    base.__init__ = here


def _start_helpers_here(module: Any) -> None:
    """Let a module of Flower's start its helpers through this file, and nothing else."""

    def start(command: list[str], **more: Any) -> Any:
        return subprocess.Popen(
            [sys.executable, "-m", "tacit.sites.process", HELPERS[command[0]], *command[1:]], **more
        )

    module.subprocess = types.SimpleNamespace(**{**vars(subprocess), "Popen": start})


def _time_to_start(seconds: int) -> None:
    from flwr.supercore.corestate import in_memory_corestate, sql_corestate

    memory: Any = in_memory_corestate
    database: Any = sql_corestate
    memory.HEARTBEAT_DEFAULT_INTERVAL = database.HEARTBEAT_DEFAULT_INTERVAL = seconds


def _keys_may_return() -> None:
    """Flower never takes a key again that was once taken away. Here its old entry gives the key up."""
    from sqlalchemy import update

    module: Any = import_module("flwr.server.superlink.linkstate.sql_linkstate")
    state, node = module.SqlLinkState, module.NodeModel
    create = state.create_node

    def again(self: Any, owner_aid: str, owner_name: str, public_key: bytes, *given: Any, **more: Any) -> Any:
        free = update(node).where(node.public_key == public_key, node.status == "unregistered")
        with self.session() as session:
            session.execute(free.values(public_key=None))
        return create(self, owner_aid, owner_name, public_key, *given, **more)

    state.create_node = again


def end_with_parent() -> None:
    """Whoever started this process holds the other end of its standard input: when that closes, it ends."""

    def wait() -> None:
        while os.read(0, 1):  # not sys.stdin: its lock would be in the way of a clean end
            pass
        os.kill(os.getpid(), 15)
        threading.Timer(5.0, lambda: os._exit(1)).start()

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    which = sys.argv.pop(1)
    if which in ("superlink", "supernode"):  # Flower's helpers look after their parents themselves
        end_with_parent()
    {
        "superlink": superlink,
        "supernode": supernode,
        "superexec": superexec,
        "serverapp": serverapp,
        "clientapp": clientapp,
    }[which]()
    sys.stdout.flush()
    os._exit(1)  # a lost connection ends Flower's work, but its web server would keep the process
