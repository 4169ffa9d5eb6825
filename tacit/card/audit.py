"""What an audit found, for people: how well the model's training images can be told from others."""

from tacit.card.document import Block, Heading, Table, Text
from tacit.evaluation.membership import Separation
from tacit.inference.membership import ATTACKS, Audit, Group

NAMES = {"loss": "loss threshold", "lira": "LiRA-style, no shadow models"}
KINDS = {"labeled": "with labels", "unlabeled": "with pseudo-labels"}


def given_away(audit: Audit) -> list[Block]:
    """The part of the card about it."""
    groups = {words: group for name, words in KINDS.items() if (group := getattr(audit, name)) is not None}
    head = ("images learned from", "attack", "members", "others", "AUC", "found at 1 % false alarms")
    rows = [
        (words, NAMES[attack], f"{group.members:,}", f"{group.others:,}", *cells(getattr(group, attack)))
        for words, group in groups.items()
        for attack in ATTACKS
    ]
    return [
        Heading("What it gives away about its training images"),
        *(Text(sentence(group, words)) for words, group in groups.items()),
        Table(head, rows),
        Text(
            "By `tacit audit`: training images against test images, the same share of each class on both sides, 95 % "
            "intervals by bootstrap. One half (and 1 %) is what guessing gives. These attacks train no models of their "
            "own; one that does may find more. Where test images differ from training images in anything else (another "
            f"site, another year), that difference is measured, too. {' '.join(audit.remarks)}".rstrip()
        ),
    ]


def cells(found: Separation) -> tuple[str, str]:
    """
    >>> cells(Separation(0.617, (0.58, 0.65), 0.034, (0.01, 0.06)))
    ('0.617 (0.580 to 0.650)', '3.4 % (1.0 to 6.0 %)')
    >>> cells(Separation(0.5, (0.4, 0.6), None, None))[1]
    'fewer than 100 others'
    """
    low, high = found.auc_interval
    area = f"{found.auc:.3f} ({low:.3f} to {high:.3f})"
    if found.hits is None or found.hits_interval is None:
        return area, "fewer than 100 others"
    low, high = found.hits_interval
    return area, f"{100 * found.hits:.1f} % ({100 * low:.1f} to {100 * high:.1f} %)"


def sentence(group: Group, words: str) -> str:
    """The plain sentence: what somebody can tell who has the model and an image.

    >>> weak, strong = Separation(0.5, (0.4, 0.6), 0.01, (0, 0.02)), Separation(0.6, (0.55, 0.65), 0.034, (0.01, 0.06))
    >>> sentence(Group(500, 500, weak, strong), "with labels")[-60:]
    'he right order; at 1 % false alarms 3.4 % of them are found.'
    """
    found: Separation = getattr(group, group.strongest)
    low, high = found.auc_interval
    area = f"AUC {found.auc:.2f}, {low:.2f} to {high:.2f}"
    if low <= 0.5:
        return (
            f"Images that it learned from {words} were told from test images no better than by guessing ({area}). That "
            "is no proof that nothing is given away."
        )
    often = f"{100 * found.auc:.0f} of 100 pairs of a training image and a test image are put in the right order"
    rest = "" if found.hits is None else f"; at 1 % false alarms {100 * found.hits:.1f} % of them are found"
    return (
        "**Who has the model and an image can tell better than by guessing whether the model learned from it** "
        f"({words}; {area}): {often}{rest}."
    )
