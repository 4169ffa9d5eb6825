"""Starts Flower's processes, looks after them, and ends them: what `tacit site serve`, `join` and `run` stand on."""

import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tacit.core.errors import TacitError
from tacit.core.text import as_word
from tacit.sites.guard import OTHER_CLOCK, UNKNOWN_KEY
from tacit.sites.home import ServerHome, SiteHome, address_of, key_bytes
from tacit.sites.jobs import HOME, Job, JobLog, job_path, leave_job
from tacit.sites.process import environment
from tacit.sites.relay import SOCKET, RelayServer

Say = Callable[[str], None]


class Child:
    """One of Flower's processes. It ends when this process ends, however it ends; its words go into a log."""

    def __init__(
        self,
        which: str,
        arguments: list[str],
        log: Path,
        surroundings: dict[str, str],
        hear: Callable[[str], None] = lambda line: None,
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        self.hear = hear
        self.tail: deque[str] = deque(maxlen=40)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tacit.sites.process", which, *arguments],
            stdin=subprocess.PIPE,  # never written to: it closes when this process is gone
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=surroundings,
            start_new_session=True,  # Ctrl-C is for us; we end it ourselves
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        with self.log.open("a") as file:
            for line in self.process.stdout or ():
                self.tail.append(line.rstrip())
                file.write(line)
                file.flush()
                self.hear(line)

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def words(self) -> str:
        """The last it said."""
        if not self.running:
            self.reader.join(timeout=2)
        return "\n".join(self.tail)

    def stop(self) -> None:
        if self.running:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=5)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)  # its helpers, too
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=5)


def needs_flower() -> None:
    try:
        import flwr  # noqa: F401
    except ImportError:
        raise TacitError("Real sites need Flower: pip install 'tacit[flower]'") from None


def is_listening(address: str, seconds: float = 2.0) -> bool:
    """Whether somebody listens there."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=seconds):
            return True
    except OSError:
        return False


# --- The server -------------------------------------------------------------------------------------------


def serve(home: ServerHome, say: Say, stop: threading.Event) -> None:
    """Run the server until told to stop. Who may join is what lies in `sites/`, at every moment."""
    needs_flower()
    if is_listening(home.local_address):
        raise TacitError(
            f"Somebody already listens on {home.local_address}: another server? Stop it, or change server.toml."
        )
    security = ["--insecure"] if home.insecure else _certificate_flags(home)
    arguments = ["--host", home.bind, "--port", str(home.port), "--disable-runtime-dependency-installation", *security]
    arguments += ["--database", str(home.folder / "state.db")]
    surroundings = environment(home.folder, **{HOME: str(home.folder)})
    home.new_secret()
    child = Child("superlink", arguments, home.folder / "log" / "server.log", surroundings, _strangers(say))
    try:
        control = _wait_until_up(child, home, stop)
        say(
            f"The server listens on {home.bind}:{home.port}"
            + (" (insecure: this machine only)" if home.insecure else "")
        )
        agreed: object = None
        while True:
            if not home.insecure and (now := home.keys_state()) != agreed and _agree(control, home, say):
                agreed = now
            if stop.wait(1.0):
                return
            if not child.running:
                raise TacitError(f"The server ended:\n{child.words()}\nIts log: {child.log}")
    finally:
        child.stop()


def _strangers(say: Say) -> Callable[[str], None]:
    """Tell of callers with an unknown key, at most once a minute."""
    announced = [-60.0]

    def hear(line: str) -> None:
        if UNKNOWN_KEY in line and time.monotonic() > announced[0] + 60:
            announced[0] = time.monotonic()
            say("Somebody with a key that is not registered tried to join and was refused.")

    return hear


def _certificate_flags(home: ServerHome) -> list[str]:
    files = {"--ssl-ca-certfile": "ca.crt", "--ssl-certfile": "server.crt", "--ssl-keyfile": "server.key"}
    for name in files.values():
        if not (home.folder / name).is_file():
            raise TacitError(
                f"{home.folder / name} is missing. Make a new server folder with `tacit site init-server`."
            )
    return [word for flag, name in files.items() for word in (flag, str(home.folder / name))] + [
        "--enable-supernode-auth"
    ]


def _wait_until_up(child: Child, home: ServerHome, stop: threading.Event, seconds: float = 120.0) -> Any:
    from tacit.sites.control import wait_until_ready

    end = time.monotonic() + seconds
    while not is_listening(home.local_address):
        if not child.running or time.monotonic() > end or stop.is_set():
            raise TacitError(f"The server did not start:\n{child.words()}\nIts log: {child.log}")
        time.sleep(0.2)
    return wait_until_ready(home, end - time.monotonic())


def _agree(control: Any, home: ServerHome, say: Say) -> bool:
    """Make Flower's list of sites the folder's; whether that worked. (The guard asks the folder itself: nobody slips
    in before this.)"""
    keys: dict[str, bytes] = {}
    for name, path in home.site_keys().items():
        try:
            keys[name] = key_bytes(path)
        except TacitError as error:
            say(f"{name} could not be registered: {error}")
    try:
        there = {site.name: site for site in control.sites()}
        for name, site in there.items():
            if keys.get(name) != site.public_key:
                control.unregister(site)
                say(f"{name} has another key now" if name in keys else f"{name} is no longer registered")
    except TacitError as error:
        say(f"The sites could not be looked up: {error}")
        return False
    for name, key in keys.items():
        try:
            if name not in there or there[name].public_key != key:
                control.register(name, key)
                say(f"{name} is registered")
        except TacitError as error:
            say(f"{name} could not be registered: {error}")
    return True


# --- A site -----------------------------------------------------------------------------------------------


def join(home: SiteHome, response: Callable[[bytes], bytes], say: Say, stop: threading.Event) -> None:
    """Take part until told to stop. A connection that is lost or refused for now is tried again, ever more slowly."""
    needs_flower()
    desk = RelayServer(response)
    surroundings = environment(home.folder, **{SOCKET: str(desk.path)})
    pause = 1.0
    try:
        while not stop.is_set():
            _wait_for_server(home, say, stop)
            check_certificate(home)
            child = Child("supernode", _node_flags(home), home.folder / "log" / "site.log", surroundings)
            try:
                began = time.monotonic()
                joined = _watch(child, home, say, stop)
            finally:
                child.stop()
            if stop.is_set():
                return
            hopeless, why = _reason(child.words(), home)
            if hopeless:
                raise TacitError(why)
            pause = 1.0 if joined and time.monotonic() - began > 60 else min(2 * pause, 15.0)
            say(f"{why} Trying again in {pause:.0f} s.")
            stop.wait(pause)
    finally:
        desk.close()


def _node_flags(home: SiteHome) -> list[str]:
    flags = ["--superlink", home.server]
    if home.insecure:
        return [*flags, "--insecure"]
    return [
        *flags,
        "--root-certificates",
        str(home.folder / "ca.crt"),
        "--auth-supernode-private-key",
        str(home.folder / "key"),
        "--max-retries",
        "3",
    ]


def _watch(child: Child, home: SiteHome, say: Say, stop: threading.Event) -> bool:
    """Until the connection ends; whether it was ever there."""
    joined = False
    while child.running and not stop.wait(0.2):
        if not joined and any("SuperNode ID" in line for line in list(child.tail)):
            joined = True
            say(f"Joined {home.server} as {home.name}. Waiting for work.")
    return joined


def _wait_for_server(home: SiteHome, say: Say, stop: threading.Event) -> None:
    """Until somebody listens at the server's address; Flower's process is not started in vain."""
    announced = False
    while not stop.is_set() and not is_listening(home.server, 10.0):
        if not announced:
            say(f"Waiting for the server at {home.server}: nobody listens there yet.")
            announced = True
        stop.wait(2.0)


def check_certificate(home: SiteHome) -> None:
    """Shake hands with the server, to say at once if it is another one. What passes by itself is tried again later."""
    if home.insecure:
        return
    try:
        trusted = ssl.create_default_context(cafile=str(home.folder / "ca.crt"))
    except OSError as error:
        raise TacitError(
            f"{home.folder / 'ca.crt'} is no certificate ({error}). Copy ca.crt from the server."
        ) from None
    address = address_of(home.server, "server")
    try:
        with (
            socket.create_connection(address, timeout=10) as connection,
            trusted.wrap_socket(connection, server_hostname=address[0]),
        ):
            pass
    except ssl.SSLCertVerificationError as error:
        raise TacitError(f"{WRONG_SERVER.format(server=home.server)} ({error.verify_message})") from None
    except ssl.SSLError as error:
        if error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"):
            raise TacitError(
                f"Whoever listens at {home.server} does not encrypt: it is no tacit server, or an insecure one. "
                "Nothing was sent. Correct 'server' in site.toml."
            ) from None
    except OSError:
        pass


WRONG_SERVER = (
    "The server at {server} is not the one that ca.crt belongs to, or it is reached by a name that its certificate "
    "does not have. Copy ca.crt from the right server, or correct 'server' in site.toml. Nothing was sent."
)
# What Flower says when it ends, whether trying again can help, and what it means.
ENDINGS: tuple[tuple[str, bool, str], ...] = (
    ("CERTIFICATE_VERIFY_FAILED", True, WRONG_SERVER),
    (
        UNKNOWN_KEY,
        False,
        "The server at {server} does not know this site's key, and nothing was sent: {name}.pub must be copied into "
        "the folder sites/ of the server's home.",
    ),
    (
        OTHER_CLOCK,
        False,
        "The clock here and the clock of the server at {server} do not agree: a site's clock may be 5 s ahead and 5 "
        "minutes behind. Nothing was sent. Set the clocks; after a restart of the server this passes by itself.",
    ),
    (
        "[code: 2004]",
        False,
        "The server at {server} does not let {name} in yet: its key is just being registered, or the server still "
        "believes in this site's last connection, which ends within half a minute. Nothing was sent.",
    ),
)


def _reason(words: str, home: SiteHome) -> tuple[bool, str]:
    for mark, hopeless, meaning in ENDINGS:
        if mark.lower() in words.lower():
            return hopeless, meaning.format(server=home.server, name=home.name)
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    marked = [number for number, line in enumerate(lines) if "Failed to initialize the connection" in line]
    last = lines[min(marked[-1] + 1, len(lines) - 1)] if marked else lines[-1] if lines else "without a word"
    return False, f"The connection to {home.server} ended ({last[:200]})."


# --- A run ------------------------------------------------------------------------------------------------


def submit(home: ServerHome, job: Job, say: Say) -> JobLog:
    """Leave the job and let Flower start the server app."""
    from tacit.sites.control import Control

    needs_flower()
    end = time.monotonic() + job.wait
    start, announced = f"tacit site serve --home {as_word(home.folder)}", False
    while not is_listening(home.local_address):
        if time.monotonic() > end:
            raise TacitError(f"Nobody listens on {home.local_address}. Start the server first: {start}")
        if not announced:
            say(f"Waiting for the server on {home.local_address}. If it does not run yet: {start}")
            announced = True
        time.sleep(1.0)
    name = leave_job(home.folder, job)
    control = Control(home)
    try:
        control.start(name)
    finally:
        control.close()
    return JobLog(job_path(home.folder, name).with_suffix(".jsonl"))


def follow(
    job_log: JobLog, home: ServerHome, show: Callable[[dict[str, object]], None], seconds: float = 600.0
) -> bool:
    """Show what happens until the run ends: True if it is done, False if its process died."""
    shown, end, process = 0, time.monotonic() + seconds, 0
    while True:
        entries = job_log.read()
        for entry in entries[shown:]:
            show(entry)
            process = int(entry.get("process", process))
            if "error" in entry:
                raise TacitError(str(entry["error"]))
            if "done" in entry:
                return True
        shown = len(entries)
        if process and not _alive(process) and len(job_log.read()) == shown:
            return False
        if not process and (time.monotonic() > end or not is_listening(home.local_address, 30.0)):
            return False  # it was never started
        time.sleep(0.2)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    stat = Path(f"/proc/{process}/stat")
    with suppress(OSError, IndexError):
        return stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return True
