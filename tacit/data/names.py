"""What the names of folders mean, in any case and spelling."""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable

THINGS = r"(images?|imgs?|pictures?|photos?|photographs?|data|set|samples?|cases?|files?)?"
UNLABELED = re.compile(
    rf"{THINGS}((un|not|non)lab(el|le|l)l?e?d|unannotated|(no|without)(any)?labels?|unlab){THINGS}\d*"
)
LABELED = re.compile(rf"{THINGS}(labell?ed|annotated){THINGS}")
ROLES = {
    "train": re.compile(rf"(train|training|trainset){THINGS}"),
    "test": re.compile(rf"(test|testing|tests|testset){THINGS}"),
    "val": re.compile(rf"(val|valid|validation|validate){THINGS}"),
}
# A folder of such a name says that it holds pictures, not of what.
SAYS_NOTHING = re.compile(
    r"(all|the|my|raw)?(images?|imgs?|pictures?|photos?|data|files?)|(jpe?g|png|tiff?|dicom|dcm)s?"
)


def plain(name: str) -> str:
    """A name as it sounds: no case, no marks between words, one way to write an accent.

    >>> plain("Un-Labeled Images"), plain("Mel_anoma") == plain("mel anoma")
    ('unlabeledimages', True)
    """
    return re.sub(r"[\s_.\-]+", "", unicodedata.normalize("NFC", name).casefold())


def is_unlabeled(name: str) -> bool:
    """
    >>> [is_unlabeled(name) for name in ("unlabelled", "UNLABELED", "unlabeled-images", "no label", "unlabled")]
    [True, True, True, True, True]
    >>> [is_unlabeled(name) for name in ("labeled", "unclear", "unknown", "label")]
    [False, False, False, False]
    """
    return UNLABELED.fullmatch(plain(name)) is not None


def role(name: str) -> str:
    """What a folder of this name holds: train, test, val, unlabeled, labeled; '' where the name is a class or a site.

    >>> [role(name) for name in ("Test", "validation", "train_images", "Unlabelled", "labeled", "nv", "testis")]
    ['test', 'val', 'train', 'unlabeled', 'labeled', '', '']
    """
    sound = plain(name)
    if UNLABELED.fullmatch(sound):
        return "unlabeled"
    if LABELED.fullmatch(sound):
        return "labeled"
    return next((kind for kind, pattern in ROLES.items() if pattern.fullmatch(sound)), "")


def says_nothing(name: str) -> bool:
    """
    >>> says_nothing("images"), says_nothing("all_images"), says_nothing("mel")
    (True, True, False)
    """
    return SAYS_NOTHING.fullmatch(plain(name)) is not None


def is_hidden(name: str) -> bool:
    """What file managers leave behind is nobody's mistake."""
    return name.startswith(".") or name.lower() in ("thumbs.db", "desktop.ini", "__macosx", "dicomdir")


def spelt_alike(names: Iterable[str]) -> list[list[str]]:
    """Names that are one word, spelt in several ways.

    >>> spelt_alike(["Mel", "nv", "mel", "b_c", "B C", "1.5", "15", "-1", "1"])
    [['Mel', 'mel'], ['B C', 'b_c']]
    """
    groups: dict[str, set[str]] = defaultdict(set)
    for name in names:
        sound = unicodedata.normalize("NFC", name).casefold().strip()
        groups[re.sub(r"(?<=\w)[\s_\-]+(?=\w)|_", " ", sound)].add(name)
    return [sorted(group) for group in groups.values() if len(group) > 1]
