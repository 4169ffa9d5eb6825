"""What is seen while a run goes on: in a real pseudo-terminal, in a pipe, by a program, or not at all."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from typer.testing import CliRunner

from runs import TINY
from tacit.cli.app import complete
from tacit.core.console import SafeConsole
from tacit.runs.folder import Run
from tacit.runs.progress import JsonLines, Lines, LiveView, Nothing, sparkline, watcher_for

SETTINGS = {"method.name": "fixmatch", "method.preset": "smoke", "data.placement": "clients", "rounds": 3, **TINY}
WORDS = [f"--set={key}={value}" for key, value in SETTINGS.items()]
ENVIRONMENT = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLUMNS", "LINES")}


def tacit(*words: str) -> list[str]:
    return [sys.executable, "-m", "tacit", *words]


def in_a_terminal(words: list[str], columns: int) -> tuple[str, int]:
    """What a program writes when it believes to be looked at, and how it ends."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    environment = {**ENVIRONMENT, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, close_fds=True)
    os.close(theirs)
    written = b""
    while True:
        try:
            some = os.read(ours, 65536)
        except OSError:  # the other side is closed
            break
        if not some:
            break
        written += some
    os.close(ours)
    return written.decode(), process.wait(timeout=60)


def test_the_live_view_in_a_terminal(tmp_path: Path) -> None:
    written, code = in_a_terminal(tacit("run", *WORDS, "--out", str(tmp_path / "run")), columns=80)
    assert code == 0, written
    assert "\x1b[?25l" in written  # the cursor is hidden while the view renews itself …
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")  # … and shown again at the end
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written)
    assert re.search(r"fixmatch +━.*warm-up round 1 of 1, client [1-4] of 4", plain)
    assert re.search(r"round 3 of 3, client [1-4] of 4", plain)
    assert re.search(r"accuracy \d+\.\d %  [▁-█]{2,4}  best \d+\.\d %", plain)
    assert re.search(
        r"accepted \d+ % \(\d+ % right\) · 4 of 4 clients answered · \d+\.\d s a round · \d+ s left", plain
    )
    assert "4 rounds in" in plain
    assert f"fixmatch: accuracy {100 * Run(tmp_path / 'run').summary['accuracy']:.2f} % (last)" in plain
    assert max(len(line) for line in plain.replace("\r", "\n").split("\n") if "·" in line or "━" in line) <= 80


def test_plain_lines_in_a_pipe(tmp_path: Path) -> None:
    done = subprocess.run(
        tacit("run", *WORDS, "--out", str(tmp_path / "run")), capture_output=True, text=True, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert len(re.findall(r"^main round \d  accuracy .* left\)$", done.stdout, flags=re.MULTILINE)) == 3


def test_json_is_for_programs_and_quiet_for_nobody(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = subprocess.run(tacit("run", *WORDS, "--out", str(folder), "--json"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *rounds, last = [json.loads(line) for line in done.stdout.splitlines()]
    assert [{"kind": "round", **record} for record in Run(folder).records] == rounds
    assert last == {"kind": "summary", "folder": str(folder), **Run(folder).summary}
    again = CliRunner().invoke(complete(), ["resume", str(folder), "--quiet"])
    assert (again.exit_code, again.output) == (0, "")
    both = CliRunner().invoke(complete(), ["run", *WORDS, "--quiet", "--json"])
    assert "Choose one of them" in str(both.exception)


def test_who_gets_which_view(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal, pipe = SafeConsole(force_terminal=True), SafeConsole(force_terminal=False)
    assert isinstance(watcher_for(terminal), LiveView)
    assert isinstance(watcher_for(pipe), Lines)
    assert isinstance(watcher_for(terminal, view="json"), JsonLines)
    assert isinstance(watcher_for(terminal, view="quiet"), Nothing)
    monkeypatch.setenv("TERM", "dumb")  # it cannot move its cursor
    assert isinstance(watcher_for(SafeConsole(force_terminal=True)), Lines)


def test_the_sparkline_shows_the_newest_between_its_own_extremes() -> None:
    assert sparkline([9.0, 0.0, 1.0], width=2) == "▁█"
    assert len(sparkline([0.1 * k for k in range(100)], width=40)) == 40
