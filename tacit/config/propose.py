"""From a look at somebody's images to an experiment that fits them, as TOML with a reason beside each choice."""

import shlex
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import tomli_w

from tacit.config.skew import skew_of
from tacit.core.text import safe
from tacit.data.drafts import SERVER
from tacit.data.folder_report import FolderReport, Item
from tacit.data.images import RULE
from tacit.data.placement import fitting_placements

METHOD = "provenance"  # for who has unlabelled images; the one place where it is named
MINUTES = 15  # that a run should not exceed
MEETING = 64  # images of a client between two meetings: two steps
MOST_PARTS = 16  # meetings in a pass over the images
LEAST_ROUNDS, MOST_ROUNDS = 20, 320
HELD_OUT_SHARE = 5  # one labelled image in so many is held out where no test set is given
KEPT_BACK, LEAST_KEPT, ENOUGH_KEPT = 0.2, 20, 200  # of the labels, for the guard; and how many images that must be
PHOTOGRAPH, PRETRAINED_SIZE = 64, 96  # pixels from which a coloured image is taken for one, and at which it is shown


class Lengths(NamedTuple):
    """How long a net learns: enough, as far as the machine is quick enough."""

    images: int  # trained on in all
    warmup: int  # passes over the labels
    generations: int  # of provenance
    earlier: float  # how many of the last one's rounds each of the others has
    folds: bool  # calibrate the first labeller; after few passes they judge it badly, but skewed classes need them
    evaluations: int  # of the main rounds at the most


FROM_RANDOM = Lengths(images=120_000, warmup=100, generations=5, earlier=0.25, folds=True, evaluations=160)
# A photograph takes long, so there are few passes.
PRETRAINED = Lengths(images=10_000, warmup=20, generations=2, earlier=0.5, folds=False, evaluations=10)
UNKNOWN_PHOTOGRAPHS = (
    "These seem to be photographs, and no net that knows photographs is installed: pip install 'tacit[pretrained]' "
    "(17 MB), then tacit init --force. With 500 labels of CIFAR-10 it ends at 83 %, random weights at 45 % "
    "(docs/evidence.md)."
)


@dataclass(frozen=True)
class PartyCounts:
    """What one party has to train with, after the test images are set aside."""

    name: str
    labeled: int
    unlabeled: int
    test: int  # given as such


@dataclass(frozen=True)
class Proposal:
    """The experiment, and what a person should know about it."""

    toml: str
    placement: str
    method: str
    rounds: int
    test_images: int
    held_out: bool
    guard: str  # whether there is one, or why not
    remarks: list[str]  # that a person should read


@dataclass(frozen=True)
class Measured:
    """What a proposal takes on this machine, from a few steps, and how often the method passes over labels."""

    rounds: int  # of the main stage of that proposal
    growing: float  # seconds of the stages that grow with them
    fixed: float  # seconds of the others
    passes: int  # over a client's labels, in a round

    def seconds(self, rounds: int) -> float:
        return self.fixed + self.growing * rounds / self.rounds

    def most_rounds(self) -> int:
        """How many fit into the time that a run should take.

        >>> Measured(rounds=20, growing=600.0, fixed=100.0, passes=1).most_rounds()       # 800 s, 30 s a round
        26
        """
        return int((60 * MINUTES - self.fixed) * self.rounds / max(self.growing, 1e-9))


def parties(report: FolderReport) -> list[PartyCounts]:
    """Counts by party, in the order in which the sites were given."""
    counts: Counter[tuple[str, str]] = Counter((item.site, _kind(item)) for item in report.usable)
    return [PartyCounts(s, *(counts[s, kind] for kind in ("labelled", "unlabelled", "test"))) for s in report.sites]


def _kind(item: Item) -> str:
    return "test" if item.part == "test" else "labelled" if item.label else "unlabelled"


def of_photographs(report: FolderReport) -> bool:
    """Whether weights learned on photographs fit these images: coloured, and not tiny."""
    return report.colour > 0 and report.size >= PHOTOGRAPH


def propose(
    report: FolderReport,
    paths: list[Path],
    name: str,
    clients: int = 0,
    gpu: bool = False,
    pretrained: bool = False,
    measured: Measured | None = None,
) -> Proposal:
    """Choose placement, net, size, method, training, guard and budget.

    `clients` deals the images of one folder out to so many pretended clients, with the labels at the server; 0 takes
    the parties as they are. `pretrained`: weights learned on photographs are installed. `measured`: what an earlier
    proposal of the same took here, so that this one fits the machine.
    """
    held = parties(report)
    sites = [party for party in held if party.name != SERVER]
    at_server = sum(party.labeled for party in held if party.name == SERVER)
    labeled, unlabeled = sum(p.labeled for p in held), sum(p.unlabeled for p in sites)
    placement = "server" if clients else fitting_placements(at_server, [(p.labeled, p.unlabeled) for p in sites])[0]
    method = METHOD if unlabeled else "fedavg"
    parts = min(max((labeled + unlabeled) // max(clients or len(sites), 1) // MEETING, 1), MOST_PARTS)
    photographs = pretrained and of_photographs(report)
    lengths = PRETRAINED if photographs else FROM_RANDOM
    stages = 1 + (lengths.generations - 1) * lengths.earlier if unlabeled else 1
    passes = int(lengths.images / max(labeled + unlabeled, 1) / stages)
    rounds = min(max(passes * parts, LEAST_ROUNDS), MOST_ROUNDS)
    if measured is not None:
        rounds = max(min(rounds, measured.most_rounds()), LEAST_ROUNDS)
    given = [f'"{safe(party.name, 60)}" {party.labeled:,}' for party in held if party.labeled]
    held_out = not report.has_test
    skew = skew_of(report.counts("train"), report.counts("test"), report.classes)
    test_images = labeled // HELD_OUT_SHARE if held_out else sum(item.part == "test" for item in report.usable)
    if clients:
        partition, who = ("iid", f"the images are dealt to {clients} pretended clients")
    else:
        partition, who = ("sites", "every site keeps its own images")
    size = PRETRAINED_SIZE if photographs else report.size
    title = f"{name}: {len(report.classes)} classes, {labeled:,} labels, {unlabeled:,} images without"
    learned = labeled - (test_images if held_out else 0)
    guard = guard_for(learned) if unlabeled else Guarded(0.0, "Every image has a label: there is nothing to guard.")
    sections = [
        [
            f"# Written by `tacit init`. Change what you like; `tacit run {_file(name)} --dry-run` shows it.",
            f"title = {_quoted(title)}",
            "seed = 0",
            _line("rounds", rounds, _budget(rounds, lengths.images, measured)),
            _line("evaluate_every", every, "rounds, because to show photographs to the net takes long")
            if (every := max(1, rounds // lengths.evaluations)) > 1
            else "",
        ],
        [
            "[data]",
            *_where(report, paths, name),
            _line("partition", partition, who),
            _line("clients", clients or len(sites), "sites" if not clients else "pretended"),
            _line("placement", placement, f"labels at: {', '.join(given)}"),
            _line("labels", 0, "all that there are") if clients else "",
            _line("validation", guard.share, guard.why) if guard.share else "",
            _line("image_size", size, RULE.format(size=size)),
            _line("skip_unreadable", True, "the bad files that `tacit init` listed are left out") if report.bad else "",
            _line("groups", "found", 'as `tacit init` told; "given": a group column alone')
            if report.groups.examples
            else "",
            ""
            if report.has_test
            else "# No test images were given: 20 % of the labelled images of each class are held "
            "out, and\n# every figure of the run rests on them.",
        ],
        _net(photographs, gpu),
        [
            "[train]                          # a recipe for short budgets (docs/training.md)",
            _line("lr", 0.01 if photographs else 0.1, "the highest learning rate: it rises to it,"),
            _line("warmup", 0.05, "in this share of a stage, and falls"),
            _line("schedule", "linear", "in a straight line"),
            _line("schedule_by", "step", "with each step"),
            _line("end", 0.01, "to this share of it"),
            _line("nesterov", True, "momentum that looks ahead"),
            _line("batch", 32, "images a step"),
            _line("parts", parts, "a round is about one of so many parts of a client's images: clients meet often")
            if parts > 1
            else "",
            _line("label_smoothing", 0.1, "so much of a label is spread over all classes"),
            _line("class_weights", "balanced", skew.why_weigh) if skew.weigh else "",
        ],
        _server(clients or len(sites)),
        [
            "[method]",
            _line("name", method, "learns from unlabelled images, too; fedavg: the labels alone")
            if unlabeled
            else _line("name", method, "every image has a label"),
        ],
        _options(rounds, lengths._replace(folds=lengths.folds or skew.weigh)) if unlabeled else [],
        _guard(guard, measured) if unlabeled else [],
    ]
    text = "\n\n".join("\n".join(line for line in section if line) for section in sections if section) + "\n"
    remarks = [*skew.remarks(), *([UNKNOWN_PHOTOGRAPHS] if of_photographs(report) and not pretrained else [])]
    return Proposal(text, placement, method, rounds, test_images, held_out, guard.why, remarks)


def _net(photographs: bool, gpu: bool) -> list[str]:
    if photographs:
        return [
            "[net]",
            _line("name", "lite0", "a net that was trained on a million photographs,"),
            _line("weights", "pretrained", "with what it learned there,"),
            _line("train", "all", '"last-6" makes a pass in half the time, and ends lower (docs/nets.md)'),
        ]
    name, why = ("wrn-28-2", "wide residual net, for the GPU") if gpu else ("cnn", "small and quick; wrn-28-2: better")
    return ["[net]", _line("name", name, why), _line("norm", "gn", "group norm: works when sites differ")]


def _server(parties: int) -> list[str]:
    """Momentum for a mean of several; one party alone is better off without (docs/training.md).

    >>> [_server(parties)[2][:16].rstrip() for parties in (2, 3, 20)]
    ['momentum = 0.5', 'momentum = 0.67', 'momentum = 0.9']
    """
    if parties < 2:
        return []
    return [
        "[server]",
        _line("name", "momentum", "the global model goes on in the direction of earlier rounds"),
        _line("momentum", round(min(1 - 1 / parties, 0.9), 2), "so much of it: 1 − 1/sites, at most .9"),
        _line("normalize", True, "a site's images count once, not by its number of steps as well"),
    ]


def _budget(rounds: int, images: int, measured: Measured | None) -> str:
    """What the rounds mean."""
    if measured is None:
        return f"about {images:,} images are trained on in all; more rounds, more time"
    return f"about {max(1, round(measured.seconds(rounds) / 60))} min on this machine, by a few steps that were timed"


@dataclass(frozen=True)
class Guarded:
    """The share of the labels that is kept back for the guard (0: there is none), and why."""

    share: float
    why: str


def guard_for(labels: int) -> Guarded:
    """How much of so many labels to keep back: a fifth, or as many as are enough; nothing where that is too few.

    >>> guard_for(240)
    Guarded(share=0.2, why='48 labels are kept back: they choose what is shipped')
    >>> guard_for(2000).share
    0.1
    >>> guard_for(60).why
    'No guard: a fifth of 60 labels is 12, too few to judge models by; with 100 labels there would be one.'
    """
    share = max(min(KEPT_BACK, round(ENOUGH_KEPT / max(labels, 1), 2)), 0.05)
    if (kept := round(share * labels)) < LEAST_KEPT:
        return Guarded(
            0.0,
            f"No guard: a fifth of {labels:,} labels is {kept}, too few to judge models by; with "
            f"{round(LEAST_KEPT / KEPT_BACK)} labels there would be one.",
        )
    return Guarded(share, f"{kept:,} labels are kept back: they choose what is shipped")


def _guard(guard: Guarded, measured: Measured | None) -> list[str]:
    """Never worse than the labels alone (docs/guard.md)."""
    if not guard.share:
        return [f"# {guard.why}"]
    return [
        "[guard]",
        _line("on", True, "ships what those labels find better: the method's model, or that of the labels alone"),
        _line("epochs", measured.passes, "passes of the latter over labels in a round: as many as the method makes")
        if measured is not None
        else "",
    ]


def _where(report: FolderReport, paths: list[Path], name: str) -> list[str]:
    """The data and how it was read, so that a run reads the same thing."""
    whole = [str(path.resolve()) for path in report.paths or paths]
    if len(whole) == 1:
        lines = [f"name = {_quoted(whole[0])}"]
    else:
        lines = [f"name = {_quoted(name)}", f"sites = [\n{_listed(whole)}]"]
    if report.tests:
        lines.append(f"tests = [  # shared by all sites\n{_listed([str(path.resolve()) for path in report.tests])}]")
    if len(whole) == 1 and Path(whole[0]).is_dir():
        kind = "table" if report.kind == "table" else "classes"
        lines.append(_line("layout", kind, "by the table in it" if kind == "table" else "what the folders inside are"))
    reasons = {"spellings": "classes spelt in two ways", "siteless": "rows that name no site"}
    lines += [_line(key, value, reasons.get(key, "of the table")) for key, value in report.chosen.items()]
    return lines + ([_line("depth", report.depth, "bits that 16-bit files use")] if report.deep else [])


def _listed(paths: list[str]) -> str:
    return "".join(f"    {_quoted(path)},\n" for path in paths)


def _options(rounds: int, lengths: Lengths) -> list[str]:
    """The options of the method that are worth choosing."""
    learners = "each of two folds and the first labeller" if lengths.folds else "the first labeller"
    few = [] if lengths.folds else [_line("held_out", False, "after so few passes folds of the labels judge it badly")]
    return [
        f"[method.{METHOD}]              # counts while {METHOD} is the method, and waits otherwise",
        _line("warmup", lengths.warmup, f"rounds on the labels, for {learners}; then"),
        _line("generations", lengths.generations, "come generations, each labelled by the model before: the last has"),
        _line("generation_rounds", max(int(rounds * lengths.earlier), 1), "`rounds`, the others this many"),
        *few,
    ]


def _line(key: str, value: object, why: str) -> str:
    """
    >>> _line("skip", True, "bad")
    'skip = true                      # bad'
    """
    shown = _quoted(value) if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
    return f"{f'{key} = {shown}':<32} # {why}"


def _file(name: str) -> str:
    """The file's name as a word of a command.

    >>> _file("photos"), _file("my photos")
    ('photos.toml', "'my photos.toml'")
    """
    return shlex.quote(f"{safe(name)}.toml")


def _quoted(text: str) -> str:
    return tomli_w.dumps({"_": text}).removeprefix("_ = ").rstrip("\n")
