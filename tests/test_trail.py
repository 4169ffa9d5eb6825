"""The audit trail of a site: every message is in it before it leaves, and whoever changes it is found out."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from site_jobs import Here, ask, job_for, make_site, make_sites, request_of, write_all
from typer.testing import CliRunner

from tacit.cli.app import complete
from tacit.core.chain import chained
from tacit.core.errors import TacitError
from tacit.core.files import digest
from tacit.runs.watchers import NullWatcher
from tacit.sites.home import init_site
from tacit.sites.server import run_at_sites
from tacit.sites.trail import Counts, Trail, head_of, names_in, problems, read_trail
from tacit.sites.wire import WHO, Response, unpack


@pytest.fixture(scope="module")
def parties(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_all(tmp_path_factory.mktemp("parties") / "parties")


@pytest.fixture
def trail(tmp_path: Path) -> Path:
    """A folder with a trail of eight lines."""
    own = Trail(tmp_path)
    for number in range(8):
        own.append(f"message {number}".encode(), {"run": "r", "job": "j", "asked": "train", "kind": "train"})
    assert problems(tmp_path) == []
    return tmp_path


def lines_of(folder: Path) -> list[str]:
    return (folder / "sent.jsonl").read_text().splitlines(keepends=True)


def put(folder: Path, lines: list[str]) -> None:
    (folder / "sent.jsonl").write_text("".join(lines))


# --- What is in it ------------------------------------------------------------------------------------------------


def test_every_message_that_left_is_in_it_with_its_digest(parties: Path, tmp_path: Path) -> None:
    here = Here(make_sites(parties, tmp_path))
    run = run_at_sites(job_for(parties, tmp_path / "run"), here, NullWatcher())
    here.request({"site-0": WHO, "site-1": b"nonsense"}, 1.0, lambda name: None)
    for name, messages in here.seen.items():
        entries = read_trail(tmp_path / name)
        assert [entry["sha256"] for entry in entries] == [digest(message) for message in messages]
        assert [entry["bytes"] for entry in entries] == [len(message) for message in messages]
        assert problems(tmp_path / name) == []
    first, *rounds, last = read_trail(tmp_path / "site-0")
    assert (first["asked"], first["kind"]) == ("hello", "hello")
    assert first["images"] == unpack(here.seen["site-0"][0], Response)[0].images
    assert len(rounds) == len(run.records)
    assert {entry["run"] for entry in rounds} == {first["run"]}
    assert {entry["job"] for entry in rounds} == {first["job"]}
    assert [entry["round"] for entry in rounds] == list(range(len(rounds)))
    assert all(names_in(entry) == ["model"] and set(entry["metrics"]) == {"loss"} for entry in rounds)
    assert all(entry["send"]["model/fc.bias"] == [10] for entry in rounds)
    assert last["kind"] == "who"
    assert read_trail(tmp_path / "site-1")[-1]["kind"] == "refused"


def test_a_line_is_on_the_disk_before_its_message_leaves(
    parties: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is asked for what it holds, and whether it was flushed, at the moment in which the answer is there."""
    site, _ = make_site(parties, tmp_path)
    flushed: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (flushed.append(os.fstat(file).st_ino), real(file))[1])
    message = site.respond(request_of(parties))
    path = tmp_path / "site-0" / "sent.jsonl"
    assert read_trail(tmp_path / "site-0")[-1]["sha256"] == digest(message)
    assert path.stat().st_ino in flushed


def test_where_nothing_can_be_written_down_nothing_leaves(parties: Path, tmp_path: Path) -> None:
    site, said = make_site(parties, tmp_path)
    assert ask(parties, site).kind == "hello"
    (tmp_path / "site-0" / "sent.head").unlink()
    (tmp_path / "site-0" / "sent.head").mkdir()
    answer = ask(parties, site, "train")
    assert (answer.kind, answer.examples) == ("refused", 0.0)
    assert "could not write down what would leave it" in answer.why
    assert any("sent.head" in line for line in said)


def test_a_restart_goes_on_with_the_list_and_its_counts(parties: Path, tmp_path: Path) -> None:
    for _ in range(2):
        site, _ = make_site(parties, tmp_path)
        assert ask(parties, site).kind == "hello"
        assert ask(parties, site, "train").kind == "train"
    entries = read_trail(tmp_path / "site-0")
    assert [entry["number"] for entry in entries] == [1, 2, 3, 4]
    assert problems(tmp_path / "site-0") == []
    counts = Trail(tmp_path / "site-0").counts(entries[0]["job"])
    assert counts == Counts(2, 2, entries[1]["bytes"] + entries[3]["bytes"])


def test_half_a_line_that_a_kill_left_is_no_message(trail: Path) -> None:
    with (trail / "sent.jsonl").open("a") as file:
        file.write('{"number": 9, "befo')
    assert problems(trail) == []
    Trail(trail).append(b"next", {"kind": "train"})
    assert problems(trail) == []
    assert [entry["number"] for entry in read_trail(trail)] == list(range(1, 10))


def test_killed_between_the_line_and_the_head(trail: Path) -> None:
    before = (trail / "sent.head").read_text()
    Trail(trail).append(b"next", {"kind": "train"})
    (trail / "sent.head").write_text(before)
    assert problems(trail) == []
    Trail(trail).append(b"one more", {"kind": "train"})
    assert problems(trail) == []


def test_two_processes_that_write_into_one_folder_by_mistake_keep_the_chain(tmp_path: Path) -> None:
    one, other = Trail(tmp_path), Trail(tmp_path)
    for number in range(6):
        (one, other)[number % 2].append(b"x", {"kind": "train", "job": "j"})
    assert problems(tmp_path) == []
    assert other.counts("j").replies == 6


def test_lines_of_an_older_tacit_stay_and_are_covered(tmp_path: Path) -> None:
    old = '{"time": "then", "run": "r", "stage": "main", "round": 0, "bytes": 5, "send": {"model/w": [1]}}\n'
    put(tmp_path, [old, old])
    Trail(tmp_path).append(b"new", {"kind": "train"})
    assert problems(tmp_path) == []
    assert len(read_trail(tmp_path)) == 3
    put(tmp_path, [old.replace("5", "4"), *lines_of(tmp_path)[1:]])
    assert problems(tmp_path) != []


# --- Who changes it is found out ------------------------------------------------------------------------------------


def changed(lines: list[str]) -> list[str]:
    return [*lines[:3], lines[3].replace('"bytes": 9', '"bytes": 8'), *lines[4:]]


def rewritten(lines: list[str]) -> list[str]:
    """With a digest that fits what the line says now."""
    entry = json.loads(lines[3])
    del entry["chain"]
    return [*lines[:3], chained(entry["before"], {**entry, "bytes": 8})[0], *lines[4:]]


def put_in(lines: list[str]) -> list[str]:
    entry = json.loads(lines[3])
    before = json.loads(lines[3])["chain"]
    del entry["chain"]
    forged = chained(before, {**entry, "number": 5, "before": before})[0]
    return [*lines[:4], forged, *lines[4:]]


TAMPERED: dict[str, tuple[Callable[[list[str]], list[str]], str]] = {
    "changed": (changed, "line 4 was changed"),
    "rewritten": (rewritten, "line 4 was rewritten"),
    "put in": (put_in, "line 5 was put in"),
    "a word put in": (lambda lines: [*lines[:4], "hello\n", *lines[4:]], "line 5 was changed or put in"),
    "removed": (lambda lines: [*lines[:3], *lines[4:]], "before line 4 something was removed: the message number 4"),
    "two removed": (
        lambda lines: [*lines[:3], *lines[5:]],
        "before line 4 something was removed: the messages number 4 to 5",
    ),
    "the first removed": (lambda lines: lines[1:], "before line 1 something was removed: the message number 1"),
    "swapped": (lambda lines: [*lines[:2], lines[3], lines[2], *lines[4:]], "before line 3 something was removed"),
    "cut": (lambda lines: lines[:-1], "the end was cut off: number 8 is not there"),
    "cut within a line": (lambda lines: [*lines[:-2], lines[-2][:20]], "the end was cut off: number 7 to 8"),
    "all gone": (lambda lines: [], "the end was cut off: number 1 to 8"),
    "the last rewritten": (
        lambda lines: [*lines[:-1], *rewritten([*lines[:3], lines[-1]])[3:]],
        "number 8 was rewritten",
    ),
}


@pytest.mark.parametrize("how", TAMPERED)
def test_tampering_is_named(trail: Path, how: str) -> None:
    change, words = TAMPERED[how]
    put(trail, change(lines_of(trail)))
    found = problems(trail)
    assert any(line.startswith(words) for line in found), found
    with pytest.raises(TacitError, match="not as it was written, so nothing is sent"):
        Trail(trail).append(b"next", {"kind": "train"})


def test_who_rewrites_all_of_it_is_found_out_by_a_digest_that_was_kept(trail: Path) -> None:
    kept = head_of(trail)
    shutil.move(trail / "sent.jsonl", trail / "old")
    (trail / "sent.head").unlink()
    own = Trail(trail)
    for number in range(9):
        own.append(b"harmless", {"kind": "train", "job": str(number)})
    assert problems(trail) == []  # as the docs say: nothing in the folder tells
    assert "the list was rewritten or cut off" in problems(trail, kept)[0]
    assert problems(trail, head_of(trail)) == []


def test_a_head_that_is_gone_is_told(trail: Path) -> None:
    (trail / "sent.head").unlink()
    assert "whether the end was cut off cannot be told" in problems(trail)[0]
    (trail / "sent.head").write_text("[]")
    assert "does not tell the last line" in problems(trail)[0]


# --- The command ----------------------------------------------------------------------------------------------------


def test_the_command_shows_and_verifies(parties: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    home = tmp_path / "site-0"
    init_site(home, "site-0", "127.0.0.1:8443", insecure=True)
    tacit = CliRunner()

    def log(*words: str) -> tuple[int, str]:
        result = tacit.invoke(complete(), ["site", "log", "--home", str(home), *words])
        return result.exit_code, result.output

    assert log() == (0, "No message has left.\n")
    site, _ = make_site(parties, tmp_path)
    ask(parties, site, run="one")
    ask(parties, site, "train", run="one")
    ask(parties, site, run="two")
    code, shown = log()
    assert code == 0
    assert "main round 1" in shown
    assert "model, examples, loss" in shown
    assert "3 messages" in shown
    assert "1 messages" in log("--run", "two")[1]
    code, shown = log("--verify")
    assert code == 0
    assert head_of(home) in shown.replace("\n", "")
    put(home, [lines_of(home)[0], *lines_of(home)[2:]])
    code, shown = log("--verify")
    assert code == 1
    assert "before line 2 something was removed: the message number 2" in shown.replace("\n", " ")
    assert log()[0] == 0  # what is there is still shown
    put(home, [*lines_of(home), '{"send": 5, "round": "x", "stage": "main", "chain": "0"}\n', "[]\n"])
    code, shown = log()
    assert (code, "3 messages" in shown) == (0, True), shown
    assert tacit.invoke(complete(), ["site", "status", "--home", str(home)]).exit_code == 0
    assert tacit.invoke(complete(), ["site", "jobs", "--home", str(home)]).exit_code == 0
    assert log("--verify")[0] == 1
