"""`tacit check` and `check_method`: what keeps the rules passes, and for each rule something that breaks it alone."""

import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tacit.cli.app import complete, main
from tacit.cli.check import ONLY
from tacit.contract.method import Method
from tacit.core.errors import TacitError
from tacit.methods import find_method
from tacit.methods.fedavg import FedAvg
from tacit.runs.plan import prepare
from tacit.testing import RULE_NAMES, CheckFailed, Report, check_method
from tacit.testing.check import explained
from tacit.testing.observe import Wrapped
from tacit.testing.rules import DROPPED, SKEWED, poor_clients
from tacit.testing.trial import Trial

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "adding-a-method.md"

HEAD = """
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from tacit import Method, Reply, TacitError, Task, weights_in
from tacit.methods.fedavg import FedAvg


"""

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a method file; a body alone becomes `Mine`, a frozen dataclass that is FedAvg but for that body."""

    def write(body: str, name: str = "mine.py", whole: bool = False) -> Path:
        text = textwrap.dedent(body).strip("\n")
        if not whole:
            text = "@dataclass(frozen=True)\nclass Mine(FedAvg):\n" + textwrap.indent(text, "    ")
        path = tmp_path / name
        path.write_text(HEAD + text + "\n")
        return path

    return write


def only_failure(report: Report) -> str:
    """The text of the one failure of a report."""
    (failure,) = report.failures
    assert failure.remedy
    return f"{failure.rule}: {failure.why} {failure.remedy}"


# --- What keeps the rules -----------------------------------------------------------------------------------------


def example() -> str:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)[0]


def test_the_example_of_the_page_keeps_every_rule(tmp_path: Path) -> None:
    (tmp_path / "sharp.py").write_text(example())
    report = check_method(tmp_path / "sharp.py")
    report.raise_for_failures()
    assert not report.warnings
    assert not report.skipped
    assert len(report.findings) == 1 + 3 * (len(RULE_NAMES) - 1)
    assert {finding.rule for finding in report.findings} == set(RULE_NAMES)
    assert [path.name for path in tmp_path.iterdir()] == ["sharp.py"]


def test_the_example_is_short_and_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some forty lines, one import of the contract, one of pieces; mypy, with the project's settings, finds nothing."""
    code = example()
    assert len(code.splitlines()) <= 45
    imports = re.findall(r"^(?:from|import) (tacit[\w.]*)", code, flags=re.MULTILINE)
    assert len(imports) == 2
    assert imports[0] == "tacit"
    assert imports[1].startswith("tacit.pieces")
    api = pytest.importorskip("mypy.api")
    (tmp_path / "sharp.py").write_text(code)
    monkeypatch.chdir(ROOT)  # its settings and its cache are here
    told, errors, code_of_exit = api.run(["--config-file", "pyproject.toml", str(tmp_path / "sharp.py")])
    assert code_of_exit == 0, told + errors


def test_fedavg_keeps_every_rule_also_as_a_class() -> None:
    report = check_method(FedAvg)
    report.raise_for_failures()
    assert report.method == "fedavg"
    accuracies = [finding.why for finding in report.findings if finding.rule == "learns"]
    assert len(accuracies) == 3
    for said in accuracies:
        found = re.fullmatch(r"accuracy (0\.\d\d) after \d of 4 rounds, 0.25 wanted", said)
        assert found is not None
        assert float(found[1]) > 0.4, "with margin"


def test_fixmatch_learns_with_margin() -> None:
    check_method("fixmatch", only=["learns"], placements=["clients"], threshold=0.4).raise_for_failures()


# --- loads --------------------------------------------------------------------------------------------------------

BAD_FILES = {
    "another name": (
        "@dataclass(frozen=True)\nclass Other(FedAvg): ...",
        "no subclass of Method with the file's name: it defines Other.",
        "Name the class Mine",
    ),
    "no method": ("class Mine: ...", "Mine is no subclass of Method.", "Write `class Mine(Method):`."),
    "nothing": ("x = 1", "it defines none", "Name the class Mine"),
    "syntax": ("def", "cannot be loaded: SyntaxError: invalid syntax (mine.py, line 11).", "Mend this"),
    "an exception": ("1 / 0", "ZeroDivisionError: division by zero (mine.py, line 11)", "Mend this"),
    "an exit": ("raise SystemExit(3)", "cannot be loaded: SystemExit: 3", "Mend this"),
    "no dataclass": ("class Mine(FedAvg): ...", "no dataclass of its own", "Write @dataclass(frozen=True)"),
    "not frozen": ("@dataclass\nclass Mine(FedAvg): ...", "not frozen", "Write @dataclass(frozen=True)"),
}
BAD_BODIES = {
    "no type": ("threshold = 0.5", "Mine.threshold = 0.5 has no type, so it is no option", "threshold: float = 0.5"),
    "no type again": ("plus = True", "so it is no option and the base's default holds", "plus: bool = True"),
    "any type": ("threshold: Any = 0.5", "has no type that can be checked", "tacit's Share"),
    "unknown type": ("threshold: 'Shaer' = 0.5", "cannot be read: name 'Shaer' is not defined", "Import the names"),
    "placement": ("placements: ClassVar = ('sever',)", "which is no placement. Did you mean 'server'?", "Write some"),
    "one placement": ("placements: ClassVar = 'server'", "= 'server' is no tuple", "('server',)"),
    "no smoke": ("presets: ClassVar = {'paper': {}}", "There is no preset 'smoke'.", "runs every stage in seconds"),
    "option": (
        "presets: ClassVar = {'paper': {}, 'smoke': {'plsu': True}}",
        "The preset 'smoke' cannot be used (labels at server): Mine has no option 'method.plsu'",
        "a plain key is an option",
    ),
    "setting": (
        "presets: ClassVar = {'paper': {'train.rl': 1}, 'smoke': {}}",
        "There is no setting 'train.rl'",
        "a dotted one a key of the experiment",
    ),
    "kind": ("client_sends: ClassVar = {'model': 'wieghts'}", "which says nothing", "Did you mean 'weights'?"),
    "kept kind": ("client_keeps: ClassVar = {'model': 7}", "'model': 7, which says nothing", "Write a text."),
    "declaration": ("server_sends: ClassVar = ['model']", "server_sends is a list", 'ClassVar = {"model": "weights"}'),
}


@pytest.mark.parametrize("case", [*BAD_FILES, *BAD_BODIES])
def test_what_does_not_load_is_told_and_nothing_else_is_asked(case: str, write: Write) -> None:
    body, why, remedy = {**BAD_FILES, **BAD_BODIES}[case]
    report = check_method(write(body, whole=case in BAD_FILES), only=["pool"])  # loads is looked at all the same
    said = only_failure(report)
    assert said.startswith("loads: ")
    assert why in said
    assert remedy in said


def test_an_option_needs_a_default(write: Write) -> None:
    path = write("@dataclass(frozen=True)\nclass Mine(Method):\n    threshold: float", whole=True)
    assert "has no default" in only_failure(check_method(path))


def test_a_class_is_checked_by_its_file(write: Write, tmp_path: Path) -> None:
    kind = find_method(str(write("gain: float = 1.0")))
    assert check_method(kind, only=["loads"]).passed
    elsewhere = find_method(str(write("gain: float = 1.0"))).__base__
    assert elsewhere is FedAvg
    other = type("Other", (FedAvg,), {"__module__": kind.__module__})
    said = only_failure(check_method(other))
    assert "Other stands in mine.py, but a method is found by the name of its file." in said
    assert "Put it into a file other.py" in said
    nowhere: type[Method] = type("Nowhere", (FedAvg,), {"__module__": "no_such_module"})
    with pytest.raises(TacitError, match=r"stands in no file.* Save it as nowhere\.py"):
        check_method(nowhere)


# --- One broken method for each of the other rules ------------------------------------------------------------------

BROKEN = {
    "raises": (
        "runs",
        "clients",
        """
        def client_train(self, task, memory, me):
            return super().client_train(task, memory, me) if me.round == 0 else 1 / 0
        """,
        "It fails: ZeroDivisionError: division by zero (mine.py, line 14, in client_train; "
        "while client 0 trained in round 1 of stage 'main').",
    ),
    "no client_train": ("runs", "server", None, "Mine sends tasks to clients but does not define client_train."),
    "a NaN": (
        "runs",
        "clients",
        """
        def client_train(self, task, memory, me):
            reply = super().client_train(task, memory, me)
            return replace(reply, send={"model": {n: t * float("nan") for n, t in reply.weights("model").items()}})
        """,
        "Client 0 in round 0 of stage 'main' answers with NaN or infinity (model/conv1.weight). Look for means of",
    ),
    "a merge of nothing": (
        "runs",
        "clients",
        """
        def server_merge(self, state, replies, hub):
            return {"model": {n: t / torch.zeros(()) for n, t in weights_in(state, "model").items()}}
        """,
        "holds NaN or infinity after the merge: the model stays. Look at server_merge",
    ),
    "no model": (
        "runs",
        "server",
        "def server_answer(self, state, hub): return None",
        "It ends without a model: server_answer gives None in the main stage. Let server_answer give",
    ),
    "sends more": (
        "declared",
        "clients",
        """
        def client_train(self, task, memory, me):
            reply = super().client_train(task, memory, me)
            return replace(reply, send={**reply.send, "sums": torch.zeros(me.classes)})
        """,
        'is refused: \'sums\' was not expected: the method does not declare it. Write "sums": "[K]" into',
    ),
    "keeps more": (
        "declared",
        "clients",
        """
        def client_train(self, task, memory, me):
            return replace(super().client_train(task, memory, me), keep={"count": 1.0})
        """,
        "'count' is kept by client 0 in round 0 of stage 'main', but client_keeps does not declare it. Write",
    ),
    "keeps other things": (
        "declared",
        "clients",
        """
        client_keeps: ClassVar = {"count": "[K]"}
        def client_train(self, task, memory, me):
            return replace(super().client_train(task, memory, me), keep={"count": 1.0})
        """,
        'client_keeps says "[K]", but \'count\' is float, expected [10]. Declare what it is ("number"?)',
    ),
    "sends less": (
        "declared",
        "clients",
        'server_sends: ClassVar = {"model": "weights", "thresholds": "[K]"}',
        "server_sends declares 'thresholds', which is sent in no task. Take it out, or write 'thresholds?'",
    ),
    "sends more down": (
        "declared",
        "clients",
        """
        def server_send(self, state, hub):
            return [replace(task, send={**task.send, "step": 1}) for task in super().server_send(state, hub)]
        """,
        "'step' is sent to client 0 in round 0 of stage 'main', but server_sends does not declare it.",
    ),
    "answers less": (
        "declared",
        "clients",
        'client_sends: ClassVar = {"model": "weights", "sure": "share"}',
        "is refused: 'sure' is missing. Send it, take it out of client_sends",
    ),
    "counts too many": (
        "declared",
        "clients",
        """
        def client_train(self, task, memory, me):
            return replace(super().client_train(task, memory, me), examples=1e5)
        """,
        "that it can have. Let examples be how many images were trained on",
    ),
    "global randomness": (
        "deterministic",
        "clients",
        """
        def client_train(self, task, memory, me):
            reply = super().client_train(task, memory, me)
            noisy = {n: t + 0.01 * torch.rand(t.shape) for n, t in reply.weights("model").items()}
            return replace(reply, send={"model": noisy})
        """,
        "Two runs with the same seed differ; they part in round 0 of stage 'main': loss is",
    ),
    "a seed of its own": (
        "deterministic",
        "clients",
        """
        def server_merge(self, state, replies, hub):
            return {"model": {n: torch.zeros_like(t) for n, t in weights_in(state, "model").items()}}
        """,
        "Another seed gives the very same model. Begin with hub.new_weights().",
    ),
    "a memory on the class": (
        "resume",
        "clients",
        """
        seen: ClassVar[list] = []
        def client_train(self, task, memory, me):
            self.seen.append(me.number)
            reply = super().client_train(task, memory, me)
            larger = {n: t * (1 + 0.001 * len(self.seen)) for n, t in reply.weights("model").items()}
            return replace(reply, send={"model": larger})
        """,
        "does not end as it does without a stop; they part in round 1 of stage 'main': loss is",
    ),
    "a memory in the process": (
        "pool",
        "clients",
        """
        seen: ClassVar[list] = []
        def client_train(self, task, memory, me):
            self.seen.append(me.number)
            reply = super().client_train(task, memory, me)
            larger = {n: t * (1 + 0.001 * len(self.seen)) for n, t in reply.weights("model").items()}
            return replace(reply, send={"model": larger})
        """,
        "One process and two give different runs; they part in round 0 of stage 'main': loss is",
    ),
    "changes the state": (
        "isolated",
        "clients",
        """
        def server_merge(self, state, replies, hub):
            merged = super().server_merge(state, replies, hub)
            for tensor in weights_in(state, "model").values():
                tensor.zero_()
            return merged
        """,
        "server_merge changes the state it was given (in 'model/conv1.weight'). Make new tensors and a new dict",
    ),
    "adds to the state": (
        "isolated",
        "clients",
        """
        def server_send(self, state, hub):
            state["round"] = hub.round
            return super().server_send(state, hub)
        """,
        "server_send changes the state it was given (in 'round').",
    ),
    "changes the replies": (
        "isolated",
        "clients",
        """
        def server_merge(self, state, replies, hub):
            for reply in replies:
                for tensor in reply.weights("model").values():
                    tensor.mul_(0.5)
            return super().server_merge(state, replies, hub)
        """,
        "server_merge changes the replies it was given (in 'model/conv1.weight').",
    ),
    "labels everywhere": (
        "silent-clients",
        "clients",
        """
        def server_send(self, state, hub):
            return [Task(client, {"model": state["model"]}) for client in hub.sample_clients()]
        def client_train(self, task, memory, me):
            assert len(me.shard.labeled), "no labels"
            return super().client_train(task, memory, me)
        """,
        "With clients that hold few images, or none of one kind, it fails: AssertionError: no labels (mine.py, line 16",
    ),
    "images everywhere": (
        "silent-clients",
        "clients",
        """
        def client_train(self, task, memory, me):
            assert len(me.shard.unlabeled), "no images"
            return super().client_train(task, memory, me)
        """,
        "With clients that hold few images, or none of one kind, it fails: AssertionError: no images (mine.py, line 14",
    ),
    "everybody answers": (
        "silent-clients",
        "server",
        """
        def server_send(self, state, hub):
            return [Task(client, {"model": state["model"]}) for client in hub.sample_clients()]
        def server_merge(self, state, replies, hub):
            assert len(replies) == hub.clients
            return super().server_merge(state, replies, hub)
        """,
        "With a single reply the merge fails: AssertionError (mine.py, line 16, in server_merge). Let server_merge",
    ),
    "learns nothing": (
        "learns",
        "clients",
        """
        def client_train(self, task, memory, me):
            return Reply(send=task.send, examples=1)
        """,
        "0.25 wanted. See whether training changes what is sent",
    ),
    "anything is welcome": (
        "bad-replies",
        "clients",
        'client_sends: ClassVar = {"model": "any"}',
        "client_sends declares 'model' as \"any\": replies of other shapes and sizes would reach the merge. Declare it",
    ),
    "any number is welcome": (
        "bad-replies",
        "clients",
        'def most_examples(self, images, largest): return float("inf")',
        "A reply in which its number of examples is 1e+300 is not refused. Let most_examples be a bound",
    ),
    "zero is not welcome": (
        "bad-replies",
        "clients",
        """
        client_sends: ClassVar = {"model": "weights", "sure": "share"}
        def client_train(self, task, memory, me):
            reply = super().client_train(task, memory, me)
            return replace(reply, send={**reply.send, "sure": 0.5})
        def server_merge(self, state, replies, hub):
            hub.note(first=replies[0].number("sure") / sum(reply.number("sure") for reply in replies))
            return super().server_merge(state, replies, hub)
        """,
        "Where all clients send 0 for every number and count, the merge fails: ZeroDivisionError: float division",
    ),
    "sums are not enough": (
        "sums",
        "clients",
        """
        merges_sums: ClassVar = {"model": "mean"}
        def server_merge(self, state, replies, hub):
            return {"model": hub.mean_model(state["model"], replies, [1 / len(replies)] * len(replies))}
        """,
        "In round 0 of stage 'main' the merge differs if it is given sums alone: 'model/",
    ),
    "a sum of what nobody sends": (
        "sums",
        "clients",
        """
        merges_sums: ClassVar = {"model": "mean", "counts": "sum"}
        def server_merge(self, state, replies, hub):
            return super().server_merge(state, replies, hub)
        """,
        "Stage 'main': it declares a sum of 'counts', which clients do not send (client_sends).",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_each_rule_is_broken_by_something_that_breaks_it_alone(case: str, write: Write) -> None:
    rule, placement, body, words = BROKEN[case]
    if body is None:
        path = write("@dataclass(frozen=True)\nclass Mine(Method): ...", whole=True)
    else:
        path = write(body)
    report = check_method(path, placements=[placement], only=[rule])
    said = only_failure(report)
    assert said.startswith(f"{rule}: ")
    assert words in said


@pytest.mark.parametrize(
    "case", ["a NaN", "changes the state", "labels everywhere", "learns nothing", "anything is welcome"]
)
def test_the_other_rules_pass_or_are_not_asked(case: str, write: Write) -> None:
    rule, placement, body, _ = BROKEN[case]
    report = check_method(write(str(body)), placements=[placement], only=set(RULE_NAMES) - {"pool"})
    assert only_failure(report).startswith(f"{rule}: ")
    assert {skip.because for skip in report.skipped} <= {rule}
    assert len(report.findings) + len(report.skipped) == len(RULE_NAMES) - 1


def test_a_client_that_changes_what_it_was_sent_is_warned(write: Write) -> None:
    """Every backend copies, and design.md says that a client may: so it is no failure."""
    path = write(
        """
        def client_train(self, task, memory, me):
            reply = super().client_train(task, memory, me)
            for tensor in task.weights("model").values():
                tensor.zero_()
            model = me.model(reply.weights("model"))
            return replace(reply, send={"model": model.state_dict()})
        """
    )
    report = check_method(path, placements=["clients"], only=["isolated", "pool"])
    assert report.passed
    (warning,) = report.warnings
    assert warning.rule == "isolated"
    assert warning.why.startswith("Client_train changes what it was sent (in 'model/conv1.weight'); what a client sent")
    assert "send me.weights(model) rather than" in warning.remedy


def test_what_a_failure_makes_pointless_is_not_asked(write: Write) -> None:
    """Also where the rule that failed was not asked for: a report with nothing in it must not look like a success."""
    report = check_method(write(str(BROKEN["sends more"][2])), placements=["clients"], only=["learns"])
    assert only_failure(report).startswith("declared: ")
    assert [tuple(skip) for skip in report.skipped] == [("learns", "clients", "declared")]
    report = check_method(write(str(BROKEN["raises"][2])), placements=["clients"], only=["learns", "isolated"])
    assert only_failure(report).startswith("runs: ")
    assert [tuple(skip) for skip in report.skipped] == [("isolated", "clients", "runs"), ("learns", "clients", "runs")]
    report = check_method(
        write(str(BROKEN["global randomness"][2])), placements=["clients"], only=["deterministic", "resume"]
    )
    assert [tuple(skip) for skip in report.skipped] == [("resume", "clients", "deterministic")]


def test_the_threshold_can_be_set_and_is_told(write: Write) -> None:
    path = write("gain: float = 1.0")
    report = check_method(path, placements=["clients"], only=["learns"], threshold=0.99)
    assert re.search(r"accuracy 0\.\d\d after 4 of 4 rounds, 0.99 wanted\. .* with --threshold", only_failure(report))


def test_the_situations_are_what_they_say(tmp_path: Path) -> None:
    """Three of four answer, then one, then nobody; and among poor clients each kind of images is missing somewhere."""
    trial = Trial("fedavg", FedAvg, None, "clients", "smoke", 0.25, tmp_path)
    run = trial.local(trial.plan(DROPPED))
    assert [len(record["answered"]) for record in run.records] == [3, 1, 0]
    parts = poor_clients(prepare(trial.experiment(SKEWED))).split.clients
    assert any(len(part.labeled) and not len(part.unlabeled) for part in parts)
    assert any(len(part.unlabeled) and not len(part.labeled) for part in parts)


def test_nothing_of_the_contract_is_lost_behind_the_glass() -> None:
    """A verb that `Wrapped` does not pass on would be the base's, whatever the method says."""
    verbs = {name for name, value in vars(Method).items() if callable(value) and not name.startswith("_")}
    assert verbs <= vars(Wrapped).keys()
    told = set(inspect.get_annotations(Method))
    glass = Wrapped(find_method("cbafed")())
    assert all(getattr(glass, name) is getattr(glass.inner, name) for name in told)


# --- The report, and misuse ---------------------------------------------------------------------------------------


def test_failures_are_raised_in_words(write: Write) -> None:
    report = check_method(write("class Other: ...", whole=True))
    with pytest.raises(CheckFailed, match=r"mine\.py fails 1 of 1 check\.\nloads: .*\n  What to do: Name the class"):
        report.raise_for_failures()


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("fedvag", {}, "Did you mean 'fedavg'?"),
        ("no/such.py", {}, "There is no method file"),
        ("~no-such-user/x.py", {}, "leads nowhere"),
        ("mine.txt", {}, "There is no method 'mine.txt'"),
        ("x/mine.txt", {}, "Give the path of a .py file"),
        (Path("mine"), {}, "Give the path of a .py file"),
        ("fedavg", {"only": ["leanrs"]}, "Did you mean 'learns'?"),
        ("fedavg", {"only": []}, "No rule is asked for"),
        ("fedavg", {"placements": ["sever"]}, "Did you mean 'server'?"),
        ("fedavg", {"placements": []}, "No placement is asked for"),
        ("bsemifl", {"placements": ["clients"]}, "does not say that it works with labels at clients. It names"),
        ("fedavg", {"threshold": 25}, "an accuracy lies between 0 and 1"),
        ("fedavg", {"threshold": float("nan")}, "an accuracy lies between 0 and 1"),
        ("fedavg", {"preset": "nothing"}, "has no preset 'nothing'. It has: paper, smoke."),
    ],
)
def test_misuse_is_told(method: str | Path, options: dict, words: str) -> None:
    with pytest.raises(TacitError) as refused:
        check_method(method, **options)
    assert words in str(refused.value)


def test_a_name_without_its_ending_is_understood(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write("gain: float = 1.0").parent)
    with pytest.raises(TacitError, match=r"There is a file mine\.py here: give it as mine\.py"):
        check_method("mine")


def test_another_preset_is_tried_at_the_same_scale(write: Write) -> None:
    path = write("presets: ClassVar = {'paper': {'rounds': 500, 'net.name': 'resnet18'}, 'smoke': {}}")
    check_method(path, preset="paper", only=["runs"], placements=["clients"]).raise_for_failures()


# --- The command --------------------------------------------------------------------------------------------------


def tacit(*words: str) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "160"}).invoke(complete(), words, catch_exceptions=False)
    return result.exit_code, result.output


def test_the_command_tells_line_by_line(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(str(BROKEN["changes the state"][2]))
    before = sorted(tmp_path.rglob("*"))
    code, said = tacit("check", "mine.py", "--placement", "clients", "--only", "isolated", "--only", "runs")
    assert code == 1
    assert re.search(r"^✓ runs           clients +\d+\.\d s$", said, flags=re.MULTILINE)
    assert re.search(r"^✗ isolated       clients +\d+\.\d s$", said, flags=re.MULTILINE)
    assert "✗ isolated, labels at clients\n  server_merge changes the state it was given" in said
    assert "\n  What to do: Make new tensors" in said
    assert "mine.py fails 1 of 2 checks" in said
    code, said = tacit("check", "mine.py", "--only", "loads")
    assert code == 0
    assert "✓ loads" in said
    assert "mine.py passes the one check" in said
    assert sorted(tmp_path.rglob("*")) == before, "nothing is written"


def test_the_command_for_programs(write: Write) -> None:
    path = write(str(BROKEN["sends more"][2]))
    code, said = tacit("check", str(path), "--placement", "clients", "--only", "learns", "--only", "loads", "--json")
    assert code == 1
    lines = [json.loads(line) for line in said.splitlines()]
    assert [line["kind"] for line in lines] == ["finding", "finding", "skipped", "report"]
    assert [line.get("rule") for line in lines[:3]] == ["loads", "declared", "learns"]
    assert lines[1]["passed"] is False
    assert lines[-1]["method"] == "mine.py"
    assert (lines[-1]["passed"], lines[-1]["checks"], lines[-1]["failures"]) == (False, 2, 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("fedvag",), "Did you mean 'fedavg'?"),
        (("./nowhere.py",), "There is no method file"),
        (("folder.py",), "There is no method file"),
        (("fedavg", "--only", "\x1b[31m"), "There is no rule '\\x1b[31m'"),
        (("fedavg", "--placement", "nowhere"), "There is no placement 'nowhere'"),
        (("fedavg", "--threshold", "7"), "an accuracy lies between 0 and 1"),
        (("fedavg", "--threshold", "x"), "'x' is not a valid float"),
        ((), "Missing argument 'METHOD'"),
        (("w" * 100_000,), "There is no method 'www"),
    ],
)
def test_misuse_of_the_command_ends_with_two_and_a_sentence(
    words: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "folder.py").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tacit", "check", *words])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # typer puts in its own
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert ended.value.code == 2, said.out + said.err
    assert message in " ".join(re.sub(r"[│╭╮╰╯─]", " ", said.err).split())
    assert "Traceback" not in said.err
    assert len(said.err) < 20_000


def test_what_a_method_says_is_shown_and_not_obeyed(write: Write) -> None:
    path = write("raise ValueError('\\x1b]0;PWN\\x07 [/b] \\u202e' + 'w' * 10_000)", whole=True)
    code, said = tacit("check", str(path))
    assert code == 1
    assert "\\x1b]0;PWN\\x07 [/b] \\u202e" in said
    assert not re.search("[\x1b\x07\u202e]", said)
    assert len(said) < 2000


def test_help_and_the_page_name_every_rule() -> None:
    assert re.findall(r"[a-z-]+", ONLY.split("(")[1]) == list(RULE_NAMES)
    page = PAGE.read_text()
    for name, demands in explained().items():
        assert f"| `{name}` | {demands} |" in page
