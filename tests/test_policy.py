"""What a site's people allow holds whatever a server asks for, and jobs wait for their yes. No Flower here."""

import csv
import io
import json
import queue
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from site_jobs import FEDAVG, Here, ask, job_for, make_site, make_sites, write_all
from typer.testing import CliRunner

from runs import digest
from tacit.backends.base import Worker
from tacit.cli import site_log
from tacit.cli.app import complete
from tacit.config.resolve import resolve
from tacit.core.errors import TacitError
from tacit.core.settings import Experiment
from tacit.engine.run import run_experiment
from tacit.runs.watchers import NullWatcher
from tacit.sites.accept import Refusal
from tacit.sites.approval import Approval, SiteJob
from tacit.sites.home import init_site
from tacit.sites.policy import Policy, check_job, policy_of, privacy_of, read_policy
from tacit.sites.server import run_at_sites
from tacit.sites.trail import names_in, problems, read_trail


@pytest.fixture(scope="module")
def parties(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_all(tmp_path_factory.mktemp("parties") / "parties")


# --- The file -----------------------------------------------------------------------------------------------------

WHOLE = """
methods = ["fedavg", "mine.py"]
names = ["model"]
metrics = []
max_message_bytes = 1_000_000
max_job_bytes = 10_000_000
max_rounds = 5
max_replies = 9
max_jobs = 2
min_images = 10
min_images_per_class = 3
require_dp = true
max_epsilon = 8
require_secure_aggregation = false
"""


def test_a_policy_is_read_from_the_sites_folder_or_from_a_file(tmp_path: Path) -> None:
    assert policy_of(tmp_path, None) == Policy()
    (tmp_path / "policy.toml").write_text(WHOLE)
    found = policy_of(tmp_path, None, ["mine.py"])
    assert (found.methods, found.max_epsilon, found.metrics) == (("fedavg", "mine.py"), 8.0, ())
    (tmp_path / "other.toml").write_text("max_rounds = 7")
    assert policy_of(tmp_path, tmp_path / "other.toml").max_rounds == 7


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_round = 5", "there is no rule 'max_round'. Did you mean 'max_rounds'?"),
        ("max_rounds = 0", "max_rounds = 0: input should be greater than or equal to 1"),
        ("max_rounds = '5'", "max_rounds = '5': input should be a valid integer"),
        ("max_rounds = true", "max_rounds = True: input should be a valid integer"),
        ("methods = 'fedavg'", "methods = 'fedavg': input should be a valid tuple"),
        ("methods = ['fedavgg']", "which this site does not have. Did you mean 'fedavg'?"),
        ("min_images = -1", "min_images = -1: input should be greater than or equal to 0"),
        ("require_dp = 1", "require_dp = 1: input should be a valid boolean"),
        ("require_dp = true\nmax_epsilon = 0", "max_epsilon = 0: input should be greater than 0"),
        ("require_dp = true\nmax_epsilon = nan", "max_epsilon = nan: input should be a finite number"),
        ("max_epsilon = 3.0", "add require_dp = true"),
        ("[limits]\nmax_rounds = 5", "there is no rule 'limits'"),
        ("max_rounds", "cannot be read as a policy"),
    ],
)
def test_a_bad_policy_is_refused_with_its_key_and_what_was_expected(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(TacitError) as caught:
        read_policy(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_join_and_preview_read_it_before_anything_else_happens(parties: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    init_site(home, "site-0", "127.0.0.1:8443", insecure=True)
    (home / "policy.toml").write_text("max_rounds = 0")
    for command in (["join"], ["preview", "demo-digits"]):
        words = ["site", *command, "--data", str(parties / "site-0"), "--home", str(home)]
        result = CliRunner().invoke(complete(), words)
        assert isinstance(result.exception, TacitError)
        assert "max_rounds = 0" in str(result.exception)
    missing = CliRunner().invoke(complete(), [*words, "--policy", str(tmp_path / "none.toml")])
    assert "none.toml cannot be read as a policy" in str(missing.exception)


# --- What breaks it is refused, before anything is computed ----------------------------------------------------------

BROKEN: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "method": ({"methods": ("feddb",)}, {}, "does not allow the method fedavg (methods: feddb)"),
    "pretrain": (
        {"methods": ("fedavg",)},
        {"pretrain.method": "fedema", "pretrain.rounds": 1},
        "does not allow the method fedema",
    ),
    "names": ({"names": ("counts",)}, {}, "does not let 'model' leave"),
    "tally": ({"names": ("model",)}, {"data.validation": 0.2}, "does not let 'tally' leave"),
    "patterns": (
        {"names": ("model", "tally")},
        {"data.validation": 0.2, "guard.on": True},
        "does not let 'patterns' leave",
    ),
    "rounds": ({"max_rounds": 1}, {"rounds": 2}, "allows 1 rounds of a job, this one has 2 (max_rounds)"),
    "images": ({"min_images": 10_000}, {}, "fewer images than its policy asks for to take part (min_images)"),
    "privacy": ({"require_dp": True}, {}, "asks for differential privacy, which this job does not have (require_dp)"),
    "secure": ({"require_secure_aggregation": True}, {}, "asks for secure aggregation"),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_what_breaks_the_policy_is_refused_before_anything_is_computed(
    rule: str, parties: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules, changes, words = BROKEN[rule]
    own = {key.replace(".", "__"): value for key, value in changes.items()}
    monkeypatch.setattr(Worker, "run", lambda *_: pytest.fail("it trained"))
    monkeypatch.setattr(Worker, "validate", lambda *_: pytest.fail("it judged"))
    monkeypatch.setattr(Worker, "compare", lambda *_: pytest.fail("it compared"))
    site, said = make_site(parties, tmp_path, policy=Policy(**rules))
    for kind in ("hello", "train", "judge", "compare"):  # also where the server never said hello
        answer = ask(parties, site, kind, **own)
        assert answer.kind == "refused"
        assert words in answer.why
        assert words in said[-1]
    told = "".join(entry["why"] for entry in read_trail(tmp_path / "site-0"))
    assert words in told


def test_the_server_is_told_and_the_run_does_not_start(parties: Path, tmp_path: Path) -> None:
    sites = make_sites(parties, tmp_path)
    sites["site-1"] = make_site(parties, tmp_path, "site-1", policy=Policy(methods=("feddb",)))[0]
    with pytest.raises(TacitError, match="site-1: its policy does not allow the method fedavg"):
        run_at_sites(job_for(parties, tmp_path / "run"), Here(sites), NullWatcher())


def test_privacy_settings_are_looked_up() -> None:
    def with_privacy(**keys: float) -> Experiment:
        return resolve(FEDAVG, {f"privacy.{key}": value for key, value in keys.items()})

    assert privacy_of(resolve(FEDAVG)) == (False, 0.0)
    assert privacy_of(with_privacy(clip=1.0)) == (False, 0.0)
    assert privacy_of(with_privacy(clip=1.0, noise=1.0, epsilon=3.0)) == (True, 3.0)
    rules = Policy(require_dp=True, max_epsilon=4.0)
    check_job(rules, with_privacy(clip=1.0, noise=1.0, epsilon=3.0), ())
    with pytest.raises(Refusal, match="at most, this job has 5"):
        check_job(rules, with_privacy(clip=1.0, noise=1.0, epsilon=5.0), ())
    with pytest.raises(Refusal, match="at most, this job has none"):
        check_job(rules, with_privacy(clip=1.0, noise=1.0), ())
    with pytest.raises(Refusal, match="asks for differential privacy"):
        check_job(rules, with_privacy(clip=1.0), ())
    check_job(Policy(require_secure_aggregation=True), with_privacy(secure_aggregation=True), ())


# --- Limits, counted -------------------------------------------------------------------------------------------------


def test_a_reply_that_is_too_large_does_not_leave(parties: Path, tmp_path: Path) -> None:
    site, said = make_site(parties, tmp_path, policy=Policy(max_message_bytes=1000))
    assert ask(parties, site).kind == "hello"
    answer = ask(parties, site, "train")
    assert (answer.kind, answer.examples) == ("refused", 0.0)
    assert "its policy allows 1.0 kB (max_message_bytes)" in answer.why
    assert max(entry["bytes"] for entry in read_trail(tmp_path / "site-0")) < 1000
    assert said[-1].startswith("refused: ")


def test_figures_that_are_not_allowed_do_not_leave(parties: Path, tmp_path: Path) -> None:
    site, _ = make_site(parties, tmp_path, policy=Policy(metrics=()))
    assert ask(parties, site, "train").why == "its policy does not let 'loss' leave (metrics)"
    assert ask(parties, make_site(parties, tmp_path, policy=Policy(metrics=("loss",)))[0], "train").kind == "train"


@pytest.mark.parametrize("rules", [{"max_rounds": 2}, {"max_replies": 2}], ids=["rounds", "replies"])
def test_contributions_are_counted_and_a_restart_does_not_forget(
    rules: dict[str, int], parties: Path, tmp_path: Path
) -> None:
    """By whatever name the server calls its run, and also where it asks for the same round again."""
    for run in ("one", "two"):
        site, _ = make_site(parties, tmp_path, policy=Policy(**rules))
        assert ask(parties, site, "train", run=run, rounds=2).kind == "train"
    site, _ = make_site(parties, tmp_path, policy=Policy(**rules))
    answer = ask(parties, site, "train", run="three", rounds=2)
    assert answer.kind == "refused"
    assert f"(max_{'rounds' if 'max_rounds' in rules else 'replies'})" in answer.why
    assert ask(parties, site, "train", seed=1, rounds=2).kind == "train"  # another job


def test_several_replies_of_one_round_count_once_as_a_round(parties: Path, tmp_path: Path) -> None:
    site, _ = make_site(parties, tmp_path, policy=Policy(max_rounds=2, max_replies=4))
    for wave in (0, 1):
        assert ask(parties, site, "train", rounds=2, wave=wave).kind == "train"
    assert ask(parties, site, "train", rounds=2, round=1, step=1).kind == "train"
    assert "max_rounds" in ask(parties, site, "train", rounds=2, round=1, step=1).why
    assert ask(parties, site, "train", rounds=2, round=1, step=1, wave=1).kind == "train"
    assert "max_replies" in ask(parties, site, "train", rounds=2, round=1, step=1, wave=2).why


def test_bytes_and_jobs_are_limited(parties: Path, tmp_path: Path) -> None:
    site, _ = make_site(parties, tmp_path)
    ask(parties, site, "train")
    (size,) = [entry["bytes"] for entry in read_trail(tmp_path / "site-0") if entry["kind"] == "train"]
    site, _ = make_site(parties, tmp_path, policy=Policy(max_job_bytes=2 * size + 100, max_jobs=1))
    assert ask(parties, site, "train").kind == "train"
    assert "more than the" in ask(parties, site, "train").why  # before it leaves
    assert "(max_jobs)" in ask(parties, site, "train", seed=1).why
    site, _ = make_site(parties, tmp_path, policy=Policy(max_job_bytes=2 * size))
    assert "(max_job_bytes)" in ask(parties, site, "hello").why  # used up: before it trains


def test_a_limit_within_a_run_is_a_fault_of_that_site_and_the_run_goes_on(parties: Path, tmp_path: Path) -> None:
    sites = make_sites(parties, tmp_path)
    sites["site-2"] = make_site(parties, tmp_path, "site-2", policy=Policy(max_replies=1))[0]
    run = run_at_sites(job_for(parties, tmp_path / "run", rounds=2), Here(sites), NullWatcher())
    assert [record["answered"] for record in run.records] == [[0, 1, 2], [0, 1]]
    assert "site-2: refused: it gave the 1 replies" in run.records[1]["refused"][0]["why"]


def test_small_classes_are_left_out(parties: Path, tmp_path: Path) -> None:
    """All labelled images of a class that has too few of them, and nothing else; the site says so to its people."""
    everything = ask(parties, make_site(parties, tmp_path / "a")[0]).images
    with (parties / "site-0" / "images.csv").open() as file:
        labels = [row["label"] for row in csv.DictReader(file)]
    counts = {label: labels.count(label) for label in set(labels) if label}
    least = min(counts.values()) + 1
    small = sorted(label for label, count in counts.items() if count < least)
    assert 0 < len(small) < len(counts)
    site, said = make_site(parties, tmp_path / "b", policy=Policy(min_images_per_class=least))
    fewer = ask(parties, site).images
    assert everything - fewer == 2 * sum(counts[label] for label in small)  # labelled and unlabelled data both
    assert any(line.endswith(f"images: {', '.join(small)}") for line in said), said


# --- Jobs that wait for a yes -----------------------------------------------------------------------------------------


def test_a_new_job_waits_is_shown_once_and_goes_on_after_a_yes(parties: Path, tmp_path: Path) -> None:
    shown: list[SiteJob] = []
    site, said = make_site(parties, tmp_path, ask=True, on_new_job=shown.append)
    for kind in ("hello", "train", "judge", "hello"):
        assert ask(parties, site, kind).kind == "waiting"
    (job,) = shown
    assert "waits: " in said[0]
    assert f"Job {job.short}: fedavg" in job.text
    assert "stage main, up to 2 rounds: in each leave model (" in job.text
    assert not any("send" in entry for entry in read_trail(tmp_path / "site-0"))  # nothing that was learned
    Approval(tmp_path / "site-0").decide(job.job[:6], "allowed")
    assert ask(parties, site, "train").kind == "train"
    again, _ = make_site(parties, tmp_path, ask=True, on_new_job=lambda job: pytest.fail("asked twice"))
    assert ask(parties, again, "train", run="another").kind == "train"  # a restart does not ask again
    Approval(tmp_path / "site-0").decide(job.job, "denied")
    assert "denied this job" in ask(parties, again, "train").why


def test_who_begins_to_ask_is_asked_about_jobs_that_are_under_way(parties: Path, tmp_path: Path) -> None:
    assert ask(parties, make_site(parties, tmp_path)[0], "train").kind == "train"
    assert [job.state for job in Approval(tmp_path / "site-0").all()] == ["not asked"]
    assert ask(parties, make_site(parties, tmp_path, ask=True)[0], "train").kind == "waiting"
    assert [job.state for job in Approval(tmp_path / "site-0").all()] == ["waiting"]


def test_another_setting_is_another_job(parties: Path, tmp_path: Path) -> None:
    shown: list[SiteJob] = []
    site, _ = make_site(parties, tmp_path, ask=True, on_new_job=shown.append)
    ask(parties, site)
    Approval(tmp_path / "site-0").decide(shown[0].job, "allowed")
    assert ask(parties, site).kind == "hello"
    assert ask(parties, site, train__epochs=7).kind == "waiting"
    assert len({job.job for job in shown}) == 2


def test_what_would_leave_is_what_leaves(parties: Path, tmp_path: Path) -> None:
    shown: list[SiteJob] = []
    site, _ = make_site(parties, tmp_path, ask=True, on_new_job=shown.append)
    ask(parties, site)
    Approval(tmp_path / "site-0").decide(shown[0].job, "allowed")
    ask(parties, site, "train")
    entry = read_trail(tmp_path / "site-0")[-1]
    assert names_in(entry) == ["model"]
    told = shown[0].text.partition("model (")[2].partition(" kB")[0]
    assert float(told) == pytest.approx(entry["bytes"] / 1000, rel=0.1)  # the header comes on top


def test_the_server_waits_for_the_yes_and_says_so(
    parties: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The people of a site say yes while the server waits; the run is then that of the simulation."""
    monkeypatch.setattr("tacit.sites.backend.ASK_AGAIN", 0.01)
    sites = make_sites(parties, tmp_path)
    told: list[str] = []

    def say(text: str) -> None:
        told.append(text)
        approval = Approval(tmp_path / "site-1")
        approval.decide(approval.all()[0].job, "allowed")

    sites["site-1"] = make_site(parties, tmp_path, "site-1", ask=True)[0]
    run = run_at_sites(job_for(parties, tmp_path / "run", wait=600.0), Here(sites), NullWatcher(), say)
    assert told == ["site-1: its people are asked whether it may take part"]
    assert digest(run) == digest(run_experiment(resolve(FEDAVG), tmp_path / "local"))
    assert problems(tmp_path / "site-1") == []


def test_without_a_yes_the_run_does_not_start(parties: Path, tmp_path: Path) -> None:
    sites = make_sites(parties, tmp_path, ask=True)
    with pytest.raises(TacitError, match="site-0: its people have not said yes to this job"):
        run_at_sites(job_for(parties, tmp_path / "run"), Here(sites), NullWatcher())


def test_the_commands_list_and_decide(parties: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    home = tmp_path / "site-0"
    init_site(home, "site-0", "127.0.0.1:8443", insecure=True)

    def tacit(*words: str) -> str:
        result = CliRunner().invoke(complete(), ["site", *words, "--home", str(home)])
        return str(result.exception) if isinstance(result.exception, TacitError) else result.output

    assert "No server has asked" in tacit("jobs")
    site, _ = make_site(parties, tmp_path, ask=True)
    ask(parties, site)
    (job,) = Approval(home).all()
    shown = tacit("jobs")
    assert job.short in shown
    assert "waiting" in shown
    assert "in each leave model (" in shown
    assert "1 jobs wait for a yes" in tacit("status")
    assert "is no job of this site" in tacit("allow", "zzzz")
    assert "is no job of this site" in tacit("allow", "")
    assert "is allowed" in tacit("allow", job.job[:5])
    assert ask(parties, site, "train").kind == "train"
    assert "is denied" in tacit("deny", job.job)
    assert ask(parties, site, "train").kind == "refused"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("typed", "state"), [("what?\nYes\n", "allowed"), ("no\n", "denied"), ("", "waiting")])
def test_on_a_terminal_the_answer_is_typed(
    typed: str, state: str, parties: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "site-0"
    init_site(home, "site-0", "127.0.0.1:8443", insecure=True)
    site, _ = make_site(parties, tmp_path, ask=True)
    ask(parties, site)
    monkeypatch.setattr(sys, "stdin", Terminal(typed))
    (job,) = Approval(home).all()
    site_log.ask_on_terminal(job, home)
    assert Approval(home).all()[0].state == state


def test_the_question_is_asked_beside_the_work(
    parties: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a terminal in a thread of its own, so that the site goes on answering; else it says which command decides."""
    home = tmp_path / "site-0"
    asked: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(site_log, "ask_on_terminal", lambda job, home: asked.put(threading.current_thread().name))
    site, _ = make_site(parties, tmp_path, ask=True, on_new_job=site_log.asker(home))
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    ask(parties, site)
    (job,) = Approval(home).all()
    assert f"tacit site allow {job.short}" in capsys.readouterr().out.replace("\n", " ")
    assert asked.empty()
    monkeypatch.setattr(sys, "stdin", Terminal())
    ask(parties, site, seed=1)
    assert asked.get(timeout=60) != threading.current_thread().name


def test_a_damaged_job_file_is_told_and_nothing_leaves(parties: Path, tmp_path: Path) -> None:
    site, said = make_site(parties, tmp_path)
    ask(parties, site)
    (path,) = (tmp_path / "site-0" / "jobs").glob("*.json")
    path.write_text(json.dumps({"state": "allowed"}))
    assert ask(parties, site, "train").kind == "refused"
    assert "is damaged: it tells whether a job is allowed" in said[-1]


def test_the_preview_says_what_the_policy_would_hold_back(parties: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    init_site(home, "site-0", "127.0.0.1:8443", insecure=True)
    recipe = tmp_path / "fedavg.toml"
    recipe.write_text(resolve(FEDAVG).to_toml())
    facts = str(parties / "server" / "facts.toml")
    words = ["site", "preview", str(recipe), "--data", str(parties / "site-0"), "--home", str(home), "--facts", facts]
    plain = CliRunner().invoke(complete(), words)
    assert plain.exit_code == 0, plain.exception
    assert "would not leave" not in plain.output
    (home / "policy.toml").write_text("max_message_bytes = 1000")
    held = CliRunner().invoke(complete(), words)
    assert "It would not leave: its reply has" in held.output.replace("\n", " ")
    assert not (home / "sent.jsonl").exists()
    (home / "policy.toml").write_text("methods = ['feddb']")
    refused = CliRunner().invoke(complete(), words)
    assert "does not allow the method fedavg" in str(refused.exception)
