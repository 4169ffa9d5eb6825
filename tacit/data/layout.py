"""A folder tree as somebody left it, and what it can mean: classes of one party, or sites with classes.

What lies deepest decides. Where two readings are possible it is asked (`Question`), where none is it is refused with
what speaks against each; nothing is guessed.
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tacit.core.errors import Answer, Question, TacitError
from tacit.core.text import safe
from tacit.data.folder_report import FolderReport, Item
from tacit.data.images import is_image
from tacit.data.names import is_hidden, role
from tacit.data.tables import TABLES

DEEPEST = 40  # folders within each other
SHORT, FLAT = "there would be", "no folder inside holds folders"
NO_CLASS, WHOSE = "so it is no class", "nobody says whose images"
FOLLOWED = 2  # links to folders are followed so deep: classes and sites may be links


@dataclass(frozen=True)
class Node:
    """A folder: its own images and other files, and its folders, all in order."""

    path: Path
    images: tuple[Path, ...]
    others: tuple[Path, ...]
    folders: tuple["Node", ...]

    @property
    def name(self) -> str:
        return self.path.name

    def every(self) -> Iterator["Node"]:
        """This folder and all below it."""
        yield self
        for folder in self.folders:
            yield from folder.every()

    @property
    def total(self) -> int:
        return sum(len(node.images) for node in self.every())

    def of(self, *roles: str) -> list["Node"]:
        """The folders inside whose names have one of these roles ('': classes or sites)."""
        return [folder for folder in self.folders if role(folder.name) in roles]

    @property
    def filled(self) -> list["Node"]:
        """The folders inside that could be classes or sites, and hold images."""
        return [folder for folder in self.of("") if folder.total]


def scan(path: Path, depth: int = 0) -> Node:
    """What lies in a folder. Hidden files and folders are nobody's mistake and are left out."""
    images, others, folders = [], [], []
    try:
        entries = sorted(os.scandir(path), key=lambda entry: entry.name)
    except OSError as error:
        raise TacitError(f"{path} cannot be looked into ({error.strerror}). Nothing was read.") from None
    for entry in entries:
        place = path / entry.name
        if is_hidden(entry.name):
            continue
        if entry.is_dir(follow_symlinks=depth < FOLLOWED) and depth < DEEPEST:
            folders.append(place)
        elif (entry.is_file() or not place.exists()) and is_image(place):  # a link to nothing is an image that is gone
            images.append(place)
        else:
            others.append(place)
    inside = tuple(scan(folder, depth + 1) for folder in folders if not _leads_back(folder))
    return Node(path, tuple(images), tuple(others), inside)


def _leads_back(folder: Path) -> bool:
    """Whether a link leads to a folder that it lies in."""
    here = folder.parent.resolve()
    return folder.is_symlink() and folder.resolve() in (here, *here.parents)


def as_party(node: Node, site: str, part: str = "train") -> FolderReport:
    """What one party's folder holds, not looked at yet: class folders, unlabelled images, train, test and val."""
    report = FolderReport(node.path, sites=[site])
    _read(node, part, report, site)
    for test in node.of("test") if part == "train" else ():
        _read(test, "test", report, site)
    return report


def _read(node: Node, part: str, report: FolderReport, site: str) -> None:
    inner = [folder for folder in node.of("train", "labeled") if folder.folders]
    for folder in node.of("val"):
        report.ignored.append(_aside(folder))
    if inner:
        for folder in node.of("unlabeled"):
            _unlabeled(folder, part, report, site)
        report.ignored += [folder.name for folder in node.of("")]
        for folder in inner:
            _read(folder, part, report, site)
        report.stray += node.images
        return
    for folder in node.folders:
        kind = role(folder.name)
        if kind == "" or (kind == "test" and part == "test"):
            _class(folder, part, report, site)
        elif kind == "labeled":  # of no class
            report.stray += folder.images
        elif kind in ("unlabeled", "train"):
            _unlabeled(folder, part, report, site)
    if any(folder.total for folder in node.folders):
        report.stray += node.images
    else:  # a flat folder: nobody says what is on its images
        report.items += [Item(image, "", part, site=site) for image in node.images]


def _unlabeled(node: Node, part: str, report: FolderReport, site: str) -> None:
    for place in node.every():
        report.items += [Item(image, "", part, site=site) for image in place.images]
        report.not_images += place.others


def _class(node: Node, part: str, report: FolderReport, site: str) -> None:
    """The images of a class, at any depth; within it `train` and `test` mean what they say."""
    label = node.name
    if label not in report.folders:
        report.folders.append(label)
    for place in node.every():
        kinds = {role(name) for name in place.path.relative_to(node.path).parts}
        if "val" in kinds:
            if role(place.name) == "val":
                report.ignored.append(f"{label}/{place.name} ({place.total} images, neither trained nor tested on)")
            continue
        own = "" if "unlabeled" in kinds else label
        report.items += [Item(image, own, "test" if "test" in kinds else part, site=site) for image in place.images]
        report.not_images += place.others


@dataclass
class Reading:
    """One thing that a folder can mean: the paths of the parties (one: itself), and tests that they share."""

    kind: str  # classes, sites or table
    paths: list[Path]
    tests: list[Path] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    stray: list[Path] = field(default_factory=list)  # images that lie beside the folders
    against: str = ""  # why it cannot be so
    counts: str = ""  # in words
    why: str = ""  # what speaks against the other reading

    @property
    def answer(self) -> Answer:
        return Answer(self.counts, f"--{self.kind}", {"layout": self.kind})


def as_classes(node: Node) -> Reading:
    """The folders inside as classes of one party."""
    report = as_party(node, node.name)
    classes = Counter(item.label for item in report.items if item.label and item.part == "train")
    tested = {item.label for item in report.items if item.label and item.part == "test"}
    against = next((why for folder in _class_folders(node) if (why := _no_class(folder))), "")
    if not against and len(classes) < 2:
        against = f"{SHORT} {len(classes) or 'no'} class"
    if not against and tested and not tested & set(classes):
        against = f"the test images would be of other classes ({_few(sorted(tested))})"
    unlabeled = sum(not item.label for item in report.items)
    words = f"1 site; {len(classes)} classes ({_counted(classes)}), {unlabeled:,} unlabelled"
    return Reading("classes", [node.path], against=against, counts=words + _tested(report.items))


def _no_class(folder: Node) -> str:
    """Why a folder cannot be a class, by what lies in it; '' where it can."""
    for inside in folder.every():
        if inside is not folder and role(inside.name) in ("unlabeled", "labeled"):
            return f"{folder.name}/ holds a folder {inside.name}/, {NO_CLASS}"
    if any(part.folders for part in folder.of("train", "test", "val")):
        return f"{folder.name}/ holds train, test or val with folders inside, {NO_CLASS}"
    return ""


def _class_folders(node: Node) -> list[Node]:
    inner = [folder for folder in node.of("train", "labeled") if folder.folders]
    return [one for folder in inner for one in _class_folders(folder)] if inner else node.of("")


def as_sites(node: Node) -> Reading:
    """The folders inside as sites, each with classes or unlabelled images; `test` beside them is shared by all."""
    inner = [folder for folder in node.of("train", "labeled") if folder.folders]
    base = inner[0] if len(inner) == 1 else node
    places = [node] if base is node else [node, base]
    sites = base.filled
    reading = Reading("sites", [site.path for site in sites])
    reading.stray = [image for place in places for image in place.images]
    reading.ignored = [f"{folder.name} (no images)" for folder in base.of("") if not folder.total]
    reading.ignored += [folder.name for folder in node.of("") if base is not node and folder.total]
    reading.ignored += [_aside(folder) for place in places for folder in place.of("val")]
    for test in (folder for place in places for folder in place.of("test")):
        reading.tests += _shared_tests(test, {site.name for site in sites})
    items = [item for site in sites for item in as_party(site, site.name).items]
    tests = [item for path in reading.tests for item in as_party(scan(path), "", "test").items]
    reading.against = _against_sites(places, sites, items, tests)
    classes = Counter(item.label for item in items if item.label and item.part == "train")
    kinds = Counter((item.site, bool(item.label)) for item in items if item.part == "train")
    held = [
        f"{safe(site.name, 60)} {kinds[site.name, True]:,} labelled, {kinds[site.name, False]:,} unlabelled"
        for site in sites[:5]
    ]
    more = "; …" if len(sites) > 5 else ""
    reading.counts = (
        f"{len(sites)} {'site' if len(sites) == 1 else 'sites'} ({'; '.join(held)}{more}); {len(classes)} classes "
        f"({_counted(classes)}){_tested([*items, *tests])}"
    )
    return reading


def _aside(folder: Node) -> str:
    return f"{folder.name} ({folder.total} images, neither trained nor tested on)"


def _shared_tests(test: Node, sites: set[str]) -> list[Path]:
    """Test images by class, or by site and class."""
    inside = test.filled
    by_site = bool(inside) and all(folder.name in sites and folder.filled for folder in inside)
    return [folder.path for folder in inside] if by_site else [test.path]


def _against_sites(places: list[Node], sites: list[Node], items: Sequence[Item], tests: Sequence[Item]) -> str:
    classes = {item.label for item in items if item.label and item.part == "train"}
    beside = [folder.name for place in places for folder in place.of("unlabeled") if folder.total]
    for site in sites:
        if why := next((why for folder in _class_folders(site) if (why := _no_class(folder))), ""):
            return f"in {site.name}, {why}"
    if not any(site.folders for site in sites):
        return FLAT
    if len(classes) < 2:
        return f"{SHORT} {len(classes) or 'no'} class"
    if tests and not {item.label for item in tests} & classes:
        return f"the test images would be of other classes ({_few(sorted({item.label for item in tests}))})"
    if beside:
        return f"{WHOSE} those in {beside[0]}/ are: move them into the folders of the sites"
    return ""


def tables_in(node: Node) -> list[Path]:
    """Tables that lie in a folder itself."""
    return [path for path in node.others if path.suffix.lower() in TABLES]


def choose(path: Path, layout: str, tables: Sequence[Path], known: Sequence[str] = ()) -> Reading:
    """The one reading of a folder, the one that was asked for, or a question. `tables`: those in the folder that
    name its images; `known`: classes that it should show, where a model says so."""
    node = scan(path)
    classes, sites = as_classes(node), as_sites(node)
    if layout == "table":
        return Reading("table", [path])
    if layout != "auto":
        wanted = classes if layout == "classes" else sites
        if layout == "sites" and sites.against:
            raise TacitError(f"{path} cannot be read as a folder of sites: {safe(sites.against)}.")
        return wanted
    possible = [reading for reading in (sites, classes) if not reading.against]
    if known and len(possible) > 1:
        possible = [reading for reading in possible if _shows(reading, known)] or possible
    if tables:
        return _with_tables(path, possible, tables)
    if len(possible) == 1:
        if sites.against.startswith(WHOSE):
            why = f"{path} can be read as classes, or as sites (but {safe(sites.against)}):"
            raise Question(why, [classes.answer])
        other = sites if possible[0] is classes else classes
        return replace(possible[0], why=other.against)
    if possible:
        raise Question(f"{path} can be read in two ways:", [reading.answer for reading in possible])
    if len(node.filled) == 1 == len(node.folders) and not node.images and node.filled[0].folders:
        return choose(node.filled[0].path, layout, [], known)  # a folder around the folder that is meant
    return _neither(path, classes, sites)


def _shows(reading: Reading, known: Sequence[str]) -> bool:
    parties = [as_party(scan(path), "") for path in (*reading.paths, *reading.tests)]
    return bool({item.label for party in parties for item in party.items} & set(known))


def _with_tables(path: Path, possible: list[Reading], tables: Sequence[Path]) -> Reading:
    if not possible:
        return Reading("table", [path])
    by_table = Answer(f"the images and labels that {safe(tables[0].name)} names", "--table", {"layout": "table"})
    raise Question(
        f"{path} can be read by its folders, or by {safe(tables[0].name)}, which names images in it:",
        [*(reading.answer for reading in possible), by_table],
    )


def _neither(path: Path, classes: Reading, sites: Reading) -> Reading:
    """No reading is good. What is merely short of classes is left to the report, which tells it in full."""
    if classes.against.startswith(SHORT) and sites.against.startswith((SHORT, FLAT)):
        return classes
    raise TacitError(
        f"{path} cannot be read.\n  As classes: {safe(classes.against)}.\n  As sites: {safe(sites.against)}.\n"
        "Expected class folders (and `unlabeled`), or a folder for each site with these inside. Give the sites one "
        "by one, as in `tacit init north/ south/`, or move the folders."
    )


def _tested(items: Sequence[Item]) -> str:
    tested = sum(item.part == "test" for item in items)
    return f", {tested:,} test images" if tested else ""


def _counted(counts: Counter[str]) -> str:
    shown = ", ".join(f"{safe(name, 40)} {number:,}" for name, number in sorted(counts.items())[:6])
    return shown + (", …" if len(counts) > 6 else "")


def _few(names: Sequence[str]) -> str:
    return ", ".join(safe(name, 60) for name in names[:4]) + (", …" if len(names) > 4 else "")
