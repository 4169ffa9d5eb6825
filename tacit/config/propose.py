"""From a look at somebody's images to an experiment that fits them, as TOML with a reason beside each choice."""

import shlex
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from tacit.config.skew import Skew, skew_of
from tacit.core.text import safe
from tacit.data.drafts import SERVER
from tacit.data.folder_report import FolderReport, Item
from tacit.data.images import RULE
from tacit.data.placement import fitting_placements

PASSES = 60_000  # images trained on in all: some minutes on a CPU with small images and the small net
WARM_UP = 60 * 32  # labelled images that a party trains on in a round of the warm-up: 60 steps
LEAST_ROUNDS, MOST_ROUNDS = 20, 100
HELD_OUT_SHARE = 5  # one labelled image in so many is held out where no test set is given


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
    skew: Skew


def parties(report: FolderReport) -> list[PartyCounts]:
    """Counts by party, in the order in which the sites were given."""
    counts: Counter[tuple[str, str]] = Counter((item.site, _kind(item)) for item in report.usable)
    return [PartyCounts(s, *(counts[s, kind] for kind in ("labelled", "unlabelled", "test"))) for s in report.sites]


def _kind(item: Item) -> str:
    return "test" if item.part == "test" else "labelled" if item.label else "unlabelled"


def propose(report: FolderReport, paths: list[Path], name: str, clients: int = 0, gpu: bool = False) -> Proposal:
    """Choose placement, net, size, method and budget. `clients` deals the images of one folder out to so many
    pretended clients, with the labels at the server; 0 takes the parties as they are."""
    held = parties(report)
    sites = [party for party in held if party.name != SERVER]
    at_server = sum(party.labeled for party in held if party.name == SERVER)
    labeled, unlabeled = sum(p.labeled for p in held), sum(p.unlabeled for p in sites)
    placement = "server" if clients else fitting_placements(at_server, [(p.labeled, p.unlabeled) for p in sites])[0]
    method = "fixmatch" if unlabeled else "fedavg"
    rounds = min(max(PASSES // max(labeled + unlabeled, 1), LEAST_ROUNDS), MOST_ROUNDS)
    given = [f'"{safe(party.name, 60)}" {party.labeled:,}' for party in held if party.labeled]
    held_out = not report.has_test
    skew = skew_of(report.counts("train"), report.counts("test"), report.classes)
    test_images = labeled // HELD_OUT_SHARE if held_out else sum(item.part == "test" for item in report.usable)
    if clients:
        partition, who = ("iid", f"the images are dealt to {clients} pretended clients")
    else:
        partition, who = ("sites", "every site keeps its own images")
    net, norm = ("wrn-28-2", "gn") if gpu else ("cnn", "gn")
    title = f"{name}: {len(report.classes)} classes, {labeled:,} labels, {unlabeled:,} images without"
    sections = [
        [
            f"# Written by `tacit init`. Change what you like; `tacit run {_file(name)} --dry-run` shows it.",
            f"title = {_quoted(title)}",
            "seed = 0",
            _line("rounds", rounds, f"about {PASSES:,} images are trained on in all; more rounds, more time"),
        ],
        [
            "[data]",
            *_where(report, paths, name),
            _line("partition", partition, who),
            _line("clients", clients or len(sites), "sites" if not clients else "pretended"),
            _line("placement", placement, f"labels at: {', '.join(given)}"),
            _line("labels", 0, "all that there are") if clients else "",
            _line("image_size", report.size, RULE.format(size=report.size)),
            _line("skip_unreadable", True, "the bad files that `tacit init` listed are left out") if report.bad else "",
            _line("groups", "found", 'as `tacit init` told; "given": a group column alone')
            if report.groups.examples
            else "",
            ""
            if report.has_test
            else "# No test images were given: 20 % of the labelled images of each class are held "
            "out, and\n# every figure of the run rests on them.",
        ],
        [
            "[net]",
            _line(
                "name", net, "wide residual net, for the GPU" if gpu else "small and quick; wrn-28-2 is larger, better"
            ),
            _line("norm", norm, "group norm: works when sites differ"),
        ],
        [
            "[train]",
            _line("lr", 0.03, "learning rate"),
            _line("batch", 32, "images a step"),
            *_epochs(clients),
            _line("class_weights", "balanced", skew.why_weigh) if skew.weigh else "",
        ],
        [
            "[method]",
            _line("name", method, "confident predictions become labels; fedavg: the labels alone")
            if unlabeled
            else _line("name", method, "every image has a label"),
        ],
        _fixmatch(labeled, sum(p.labeled > 0 for p in held)) if unlabeled else [],
    ]
    text = "\n\n".join("\n".join(line for line in section if line) for section in sections if section) + "\n"
    return Proposal(text, placement, method, rounds, test_images, held_out, skew)


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


def _epochs(clients: int) -> list[str]:
    return [_line("server_epochs", 5, "passes over the server's labels in a round")] if clients else []


def _fixmatch(labeled: int, holders: int) -> list[str]:
    epochs = min(max(WARM_UP * max(holders, 1) // max(labeled, 1), 1), 20)
    return [
        "[method.fixmatch]                # counts while fixmatch is the method, and waits otherwise",
        _line("threshold", 0.9, "how sure a prediction must be to be learned"),
        _line("warmup", 5, "rounds on the labels alone before that,"),
        _line("warmup_epochs", epochs, "with so many passes over them in each"),
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
