"""A look at the user's own images before anything is done with them: what is there, what is wrong."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tacit.core.text import safe
from tacit.data.arrays import invalid_name
from tacit.data.groups import Groups, find, shared, shared_sentence
from tacit.data.images import LARGEST, RULE, SMALLEST

NO_TEST_SET = "no test set was given: 20 % of the labelled images of each class are held out, seeded"


@dataclass(frozen=True)
class Item:
    """One image file and what is known about it."""

    path: Path
    label: str = ""  # empty: unlabelled
    part: str = "train"  # or "test"
    group: str = ""  # images that belong together; empty: alone
    site: str = ""  # the party that holds it
    array: np.ndarray | None = field(default=None, compare=False)  # the image itself, where it lies in no file
    twin: bytes = b""  # equal for images with equal pixels
    glance: bytes = field(default=b"", compare=False, repr=False)  # for near-duplicates (`near_duplicates.glance`)


@dataclass
class FolderReport:
    """What a folder (or a table) of images holds; `text` says it to people."""

    path: Path
    items: list[Item] = field(default_factory=list)  # readable images
    unreadable: list[tuple[Path, str]] = field(default_factory=list)  # and why
    not_images: list[Path] = field(default_factory=list)  # by their names
    stray: list[Path] = field(default_factory=list)  # images that lie in no class folder
    ignored: list[str] = field(default_factory=list)  # folders that are not read, such as val
    folders: list[str] = field(default_factory=list)  # every class that was promised, also the empty ones
    order: list[str] = field(default_factory=list)  # the classes, where the data itself lists them
    sites: list[str] = field(default_factory=list)  # the parties, the server (if it is one) among them
    notes: list[str] = field(default_factory=list)  # what the data's own reader has to say
    largest: int = LARGEST  # the largest size to which images are read where nobody asks for one
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)  # (width, height)
    grey: int = 0
    colour: int = 0
    deep: Counter[int] = field(default_factory=Counter)  # 16-bit files by the bits that they use
    depth: int = 16  # the bits that are used of them
    kind: str = ""  # how it was read: classes, sites or table
    paths: list[Path] = field(default_factory=list)  # of the parties, as it was read
    tests: list[Path] = field(default_factory=list)  # test images that all parties share
    chosen: dict[str, str] = field(default_factory=dict)  # settings that say how a table was read
    told: list[str] = field(default_factory=list)  # what was chosen, for the screen
    left_out: list[tuple[Path, str]] = field(default_factory=list)  # good images that were not asked for, and why
    guess_groups: bool = True  # look for groups in names and pictures, besides those that were given
    _groups: tuple[tuple[int, bool], Groups] | None = field(default=None, repr=False)  # what they were found in, groups

    @property
    def classes(self) -> list[str]:
        """Classes with at least one readable image; 2 comes before 10 where all names are numbers."""
        if self.order:
            return self.order
        names = {item.label for item in self.items if item.label}
        return sorted(names, key=int) if all(name.isdecimal() for name in names) else sorted(names)

    @property
    def empty_classes(self) -> list[str]:
        return [name for name in self.folders if name not in self.classes]

    @property
    def has_test(self) -> bool:
        return any(item.part == "test" for item in self.items)

    def counts(self, part: str) -> Counter[str]:
        return Counter(item.label for item in self.items if item.part == part)

    @property
    def size(self) -> int:
        """The most common shorter side (the smaller one of equals), at least 8 and at most 64 (.npz: any)."""
        sides: Counter[int] = Counter()
        for (width, height), number in self.sizes.items():
            sides[min(width, height)] += number
        common = min(sides, key=lambda side: (-sides[side], side), default=SMALLEST)
        return min(max(common, SMALLEST), self.largest)

    @property
    def leaked(self) -> list[Item]:
        """Training images that the test set holds, too, pixel for pixel: testing on them would be too easy."""
        tested = {item.twin for item in self.items if item.part == "test"}
        return [item for item in self.items if item.part == "train" and item.twin in tested]

    @property
    def usable(self) -> list[Item]:
        """What is left when the bad files are left out."""
        leaked = {id(item) for item in self.leaked}
        return [item for item in self.items if id(item) not in leaked]

    @property
    def groups(self) -> Groups:
        """Which of the usable images belong together. It takes a while, so it is done once."""
        state = len(self.items), self.guess_groups
        if self._groups is None or self._groups[0] != state:
            self._groups = state, find(self.usable, self.guess_groups)
        return self._groups[1]

    @property
    def shared_groups(self) -> list[str]:
        """That a given test set has images of groups that are trained on, too."""
        test = np.array([item.part == "test" for item in self.usable], bool)
        number = shared(self.groups.numbers, test)
        return [shared_sentence(number, int(test.sum()))] if number else []

    @property
    def disputed(self) -> list[list[Item]]:
        """Images that lie under two labels, pixel for pixel."""
        found: dict[bytes, list[Item]] = {}
        for item in self.items:
            if item.label:
                found.setdefault(item.twin, []).append(item)
        return [twins for twins in found.values() if len({item.label for item in twins}) > 1]

    @property
    def hopeless(self) -> list[str]:
        """What leaving out the bad files would not fix."""
        faults = []
        labeled = [item for item in self.items if item.label]
        if len(self.items) < 2:
            faults.append(f"{len(self.items) or 'no'} readable image: nothing can be learnt and tested with it")
        elif len(self.classes) < 2:
            faults.append(f"{len(self.classes) or 'no'} class with images; at least two are needed to tell apart")
        elif not self.has_test and len(labeled) == len(self.classes):
            faults.append("one image for each class: none can be held out to test with")
        for name in self.classes:
            if why := invalid_name(name):
                faults.append(f"the class name '{safe(name)}' {why}: rename the class")
        if self.has_test and not any(item.part == "train" for item in labeled):
            faults.append("no labelled training image")
        if any(item.part == "test" and not item.label for item in self.items):
            faults.append(
                "test images without a label: nothing could be measured on them (a class called `test` must be renamed)"
            )
        return faults

    @property
    def bad(self) -> list[str]:
        """What can be left out, if the user says so."""
        faults = []
        if self.unreadable:
            number, of = len(self.unreadable), len(self.unreadable) + len(self.items)
            share = f"{number} of {of}, {100 * number / of:.1f} %"
            faults.append(f"images that cannot be read ({share}): {self._unreadable()}")
        if self.not_images:
            faults.append(f"not images, by their names ({len(self.not_images)}): {_few(self.not_images)}")
        if self.stray:
            faults.append(f"images that lie in no class folder ({len(self.stray)}): {_few(self.stray)}")
        if self.empty_classes:
            faults.append(f"empty classes ({len(self.empty_classes)}): {_few(self.empty_classes)}")
        if leaked := self.leaked:
            faults.append(f"training images that are in the test set, too ({len(leaked)}): {_few_items(leaked)}")
        return faults

    def remarks(self, size: int) -> list[str]:
        """What is done to good images, which a reader of results should know."""
        remarks = list(self.notes)
        if self.grey and self.colour:
            remarks.append(f"grey ({self.grey}) and colour ({self.colour}) images are mixed: all become RGB")
        if set(self.sizes) - {(size, size)}:
            common = ", ".join(f"{w}×{h} ({number})" for (w, h), number in self.sizes.most_common(3))
            more = ", …" if len(self.sizes) > 3 else ""
            remarks.append(f"sizes are {common}{more}: {RULE.format(size=size)}")
        if self.deep:
            remarks.append(self._depth())
        if self.left_out:
            remarks.append(f"left out, as was asked for ({len(self.left_out)})")
        if self.ignored:
            remarks.append(f"not read: {', '.join(map(safe, self.ignored))}")
        if disputed := self.disputed:
            remarks.append(f"the same picture under two labels ({len(disputed)})")
        untrained = [name for name in self.classes if not self.counts("train")[name]]
        if untrained:
            remarks.append(f"only in the test set: {_few(untrained)}")
        remarks += [*self.groups.remarks, *self.shared_groups]
        if not self.has_test:
            remarks.append(NO_TEST_SET)
        return remarks

    @property
    def quarrels(self) -> list[str]:
        """Which pictures lie under two labels, and which are taken as groups, by name: for the screen, not a note."""
        pairs = [" = ".join(safe(f"{i.label}/{i.path.name}") for i in twins[:3]) for twins in self.disputed]
        disputed = [f"under two labels: {'; '.join(pairs[:3])}{'; …' * (len(pairs) > 3)}"] if pairs else []
        return [*disputed, *self.groups.examples]

    @property
    def text(self) -> str:
        train, test = self.counts("train"), self.counts("test")
        unlabeled = train.pop("", 0)
        lines = [
            f"{self.path}: {len(self.items)} readable images in {len(self.classes)} classes, {unlabeled} unlabelled"
        ]
        for name in [*self.classes, *self.empty_classes]:
            split = f"{train[name]:>7} train {test[name]:>7} test" if self.has_test else f"{train[name]:>7}"
            lines.append(f"  {safe(name):<24}{split}")
        lines += [f"  ✗ {fault}" for fault in (*self.hopeless, *self.bad)]
        lines += [f"  · {remark}" for remark in (*self.remarks(self.size), *self.quarrels)]
        return "\n".join(lines)

    @property
    def unusable(self) -> list[tuple[Path, str]]:
        """Every file that is not used, and why: the whole list, where the screen shows a few."""
        return [
            *self.unreadable,
            *((path, "not an image, by its name") for path in self.not_images),
            *((path, "lies in no class folder") for path in self.stray),
            *((item.path, "is in the test set, too") for item in self.leaked),
            *((Path(name), "a class without images") for name in self.empty_classes),
            *self.left_out,
            *((Path(name), "not read") for name in self.ignored),
        ]

    def _depth(self) -> str:
        """What was made of 16-bit files.

        >>> FolderReport(Path("x"), deep=Counter({12: 40}), depth=12)._depth()
        '16-bit files (40) use 12 bits: the values 0 to 4095 become 0 to 255'
        """
        by_bits = ", ".join(f"{bits} bits ({number})" for bits, number in sorted(self.deep.items()))
        found = (
            f" use {self.depth} bits" if list(self.deep) == [self.depth] else f" use {by_bits}; {self.depth} are taken"
        )
        return f"16-bit files ({self.deep.total()}){found}: the values 0 to {2**self.depth - 1} become 0 to 255"

    def _unreadable(self) -> str:
        few = ", ".join(f"{safe(path.name)} ({safe(why)})" for path, why in self.unreadable[:3])
        return few + (", …" if len(self.unreadable) > 3 else "")


def _few_items(items: list[Item]) -> str:
    return _few([f"{item.path.parent.name}/{item.path.name}" for item in items])


def _few(things: list[Path] | list[str]) -> str:
    """
    >>> _few(["a", "b", "c", "d", "e"])
    'a, b, c, …'
    """
    names = [thing.name if isinstance(thing, Path) else thing for thing in things]
    return ", ".join(map(safe, names[:3])) + (", …" if len(names) > 3 else "")
