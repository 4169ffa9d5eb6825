"""Groups by the names of files and folders: what the names of somebody's images tell about which belong together.

Names are evidence, not proof, so a rule fires only where it is convincing, and what it found is told with an example:

1. **Words.** `patient7`, `lesion_0012`, `sub-03` and the like, in a file's name or as a folder: that is the group.
2. **Copies.** `x copy.jpg`, `x (1).jpg` and `x_v2.jpg` belong to `x.jpg`, if there is an `x.jpg`.
3. **Takes.** A stem that holds a number, then a short end: a letter (`_a`), a side (`_left`) or a small number (`-2`).
   Only where at least two and at most twelve files share the stem. If any number at the end is above 20, numbers
   count pictures, and none of them makes a group (`IMG_0001`, `IMG_0002` are two pictures of whatever).
4. **Folders** below a class whose names hold a number, if there are five or more, none with more than fifty images
   or a fifth of them, and not all of them years.

Where one name occurs in several folders, names count within a folder, and a stem is a group only inside it. A rule that
would make one group of all images of a class has taken something else for a group, and is not followed.
"""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

WORDS = (
    *("patient", "participant", "subject", "person", "individual", "animal", "pat", "subj", "sub", "pid"),
    *("case", "specimen", "slide", "eye", "lesion"),
)  # the wider ones first: two lesions of one patient are one group
MOST_TAKES, HIGHEST_TAKE = 12, 20
FEW = 4  # images of a class, below which one group may hold them all
LEAST_FOLDERS, MOST_IN_FOLDER = 5, 50
UNLABELED = re.compile(r"un-?label+ed.*", re.IGNORECASE)

_COPY = re.compile(r"[ _-]+(?:copy|kopie|copie|copia)(?: ?\(?\d{1,2}\)?)?$|[ _-]?\(\d{1,2}\)$|[ _-]v\d{1,2}$", re.I)
_VERSION = re.compile(r"[ _-]v(\d{1,2})$", re.I)
_LETTER = re.compile(r"[ _-]([a-h])$", re.I)
_SIDE = re.compile(r"[ _-](left|right|l|r|od|os|front|back|frontal|lateral|top|bottom|before|after)$", re.I)
_NUMBER = re.compile(r"[ _-](\d{1,2})$")
_YEAR = re.compile(r"(19|20)\d\d$")


def groups_by_name(paths: Sequence[Path], labels: Sequence[str]) -> list[str]:
    """A name of the group for each image; '' where its name tells none. Groups have at least two images.

    >>> names = ["lesion_0012_a.jpg", "lesion_0012_b.jpg", "IMG_0001.jpg", "IMG_0002.jpg", "12-1.png", "12-2.png"]
    >>> groups_by_name([Path("nv", name) for name in names], ["nv"] * 6)
    ['lesion 12', 'lesion 12', '', '', '12', '12']
    """
    found = [""] * len(paths)
    for rule in (by_word, by_folder, by_stem):
        more = rule(paths, labels)
        if _convincing(more, labels):
            found = [own or other for own, other in zip(found, more, strict=True)]
    sizes = Counter(found)
    return [name if sizes[name] > 1 else "" for name in found]


def _convincing(names: Sequence[str], labels: Sequence[str]) -> bool:
    """Whether every class with some images has more than one group, or images that stand alone."""
    held: defaultdict[str, list[str]] = defaultdict(list)
    for name, label in zip(names, labels, strict=True):
        held[label].append(name)
    return all(len(own) < FEW or len(set(own)) > 1 or not own[0] for own in held.values())


def by_word(paths: Sequence[Path], labels: Sequence[str]) -> list[str]:
    """The word with its number: of the file's own name first, then of the folders it lies in, but for the class's own.

    >>> paths = [Path("sub-03_T1.png"), Path("a/Patient 7/x.png"), Path("b/patient07/left/y.png"), Path("case1/12.png")]
    >>> by_word(paths, ["a", "a", "b", "case1"])
    ['sub 3', 'patient 7', 'patient 7', '']
    """
    names = _names(paths, [_word(path.stem) for path in paths])
    above = len(Path(os.path.commonpath([path.parent for path in paths])).parts) if paths else 0
    for place, (path, label) in enumerate(zip(paths, labels, strict=True)):
        folders = [] if names[place] else [one for one in path.parts[above:-1] if one != label]
        names[place] = names[place] or next((word for one in folders if (word := _word(one))), "")
    return names


def _word(text: str) -> str:
    for word in WORDS:
        if match := re.search(rf"(?:^|[^a-z]){word}[ _-]?0*(\d+)(?![a-z0-9])", text, re.I):
            return f"{word} {match[1]}"
    return ""


def by_stem(paths: Sequence[Path], labels: Sequence[str] = ()) -> list[str]:
    """The stem, without marks of copies and of takes.

    >>> by_stem([Path(f"{name}.jpg") for name in ("x", "x copy", "cat (1)", "cat (2)", "s7_left", "s7_right", "s_1")])
    ['x', 'x', '', '', 's7', 's7', '']
    """
    there = {path.stem.lower() for path in paths}
    plain = [_COPY.sub("", path.stem) for path in paths]
    stems = [one if one.lower() in there else path.stem for one, path in zip(plain, paths, strict=True)]
    counted = any(int(match[1]) > HIGHEST_TAKE for stem in stems if (match := _NUMBER.search(stem)))
    ends = (_LETTER, _SIDE, _VERSION) if counted else (_LETTER, _SIDE, _VERSION, _NUMBER)
    bare = [_without(stem, ends) for stem in stems]
    takes = _names(paths, [one if re.search(r"\d", one) else "" for one in bare])
    sizes = Counter(takes)
    takes = [one if 2 <= sizes[one] <= MOST_TAKES else "" for one in takes]
    copies = _names(paths, stems)
    sizes = Counter(copies)
    return [take or (copy if sizes[copy] > 1 else "") for take, copy in zip(takes, copies, strict=True)]


def _without(stem: str, ends: Sequence[re.Pattern[str]]) -> str:
    for end in ends:
        if match := end.search(stem):
            return stem[: match.start()]
    return stem


def _names(paths: Sequence[Path], names: list[str]) -> list[str]:
    """The names, in small letters; with the folder before it where a file of this group is there in two folders."""
    folders: defaultdict[tuple[str, str], set[Path]] = defaultdict(set)
    for path, name in zip(paths, names, strict=True):
        folders[name.lower(), path.stem.lower()].add(path.parent)
    local = {name for (name, _), places in folders.items() if len(places) > 1}
    lower = [name.lower() for name in names]
    return [
        f"{path.parent}/{name}" if name in local and name else name for path, name in zip(paths, lower, strict=True)
    ]


def by_folder(paths: Sequence[Path], labels: Sequence[str]) -> list[str]:
    """The folder below the class, where folders look like patients.

    >>> paths = [Path(label, f"{number:03d}", f"{i}.png") for label in "ab" for number in range(5) for i in range(2)]
    >>> found = by_folder(paths, [path.parts[0] for path in paths])
    >>> found[0], found[10], len(set(found))                                       # patient 000 is in both classes
    ('000', '000', 5)
    """
    inner = [_below(path, label) for path, label in zip(paths, labels, strict=True)]
    sizes = Counter(name for name in inner if name)
    plenty = len(sizes) >= LEAST_FOLDERS and all(re.search(r"\d", name) for name in sizes)
    small = all(size <= min(MOST_IN_FOLDER, max(len(paths) / 5, 2)) for size in sizes.values())
    if plenty and small and not all(_YEAR.match(name) for name in sizes):
        return inner
    return [""] * len(paths)


def _below(path: Path, label: str) -> str:
    """The first folder below that of the class (or of the unlabelled images); '' where there is none."""
    folders = path.parts[:-1]
    for place in range(len(folders) - 1, -1, -1):
        if folders[place] == label if label else UNLABELED.match(folders[place]):
            return folders[place + 1].lower() if place + 1 < len(folders) else ""
    return ""
