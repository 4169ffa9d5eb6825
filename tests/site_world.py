"""A federation of real processes on this machine, for tests: keys, TLS, a server, sites. All of them end with it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.machine import descendants

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def tacit(*words: object, cwd: Path | None = None) -> list[str]:
    return [sys.executable, "-m", "tacit", *map(str, words)]


class Process:
    """A command in a session of its own, its words in a file; `kill` is sudden and takes its children along."""

    def __init__(self, words: list[str], log: Path) -> None:
        self.log = log
        with log.open("a") as file:
            self.popen = subprocess.Popen(
                words,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=ENVIRONMENT,
                start_new_session=True,
            )

    def said(self) -> str:
        return self.log.read_text()

    def wait_for(self, text: str, seconds: float = 120.0, times: int = 1) -> None:
        until(
            lambda: self.said().count(text) >= times or self.popen.poll() is not None,
            seconds,
            f"'{text}' in {self.said()}",
        )
        assert self.said().count(text) >= times, self.said()

    def end(self, seconds: float = 120.0) -> int:
        """Its exit code, when it has ended by itself."""
        return self.popen.wait(timeout=seconds)

    def kill(self) -> None:
        for pid in [self.popen.pid, *descendants(self.popen.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.popen.wait(timeout=10)

    def stop(self) -> None:
        if self.popen.poll() is None:
            self.popen.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(timeout=15)
        self.kill()


def command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def memory_of(pid: int) -> int:
    """The most memory that a process ever had, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) * 1024


def listening(process: Process) -> set[int]:
    """The TCP ports on which a process or one that comes from it listens."""
    sockets = set()
    for pid in [process.popen.pid, *descendants(process.popen.pid)]:
        for entry in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(entry))
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                ports.add(int(words[1].rpartition(":")[2], 16))
    return ports


def until(condition: Callable[[], object], seconds: float, what: str = "") -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"nothing happened within {seconds} s: {what}"
        time.sleep(0.05)


def free_port() -> int:
    """A port of this machine that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class World:
    """A server and three sites with their folders; everything is started by the commands that people use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.processes: list[Process] = []
        self.server: Process
        self.sites: dict[str, Process] = {}
        self.home = folder / "server"

    def once(self, *words: object) -> str:
        """A command that ends by itself; what it said."""
        result = subprocess.run(tacit(*words), capture_output=True, text=True, env=ENVIRONMENT, timeout=120)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def start(self, *words: object, log: str) -> Process:
        process = Process(tacit(*words), self.folder / f"{log}.log")
        self.processes.append(process)
        return process

    def serve(self) -> None:
        self.server = self.start("site", "serve", "--home", self.home, log="server")

    def join(self, name: str, data: Path, *more: object, home: Path | None = None) -> Process:
        process = self.start(
            "site", "join", "--data", data, "--home", home or self.folder / name, *more, log=f"join-{name}"
        )
        self.sites[name] = process
        return process

    def run(self, out: Path, *words: object) -> Process:
        return self.start("site", "run", "--out", out, "--home", self.home, *words, log=f"run-{out.name}")

    def close(self) -> None:
        for process in reversed(self.processes):
            process.kill()
