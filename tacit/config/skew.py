"""How unevenly labels are spread over classes, and what a person should know of it before training."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tacit.core.formatting import MAJORITY
from tacit.core.text import safe
from tacit.data.groups import HELD_OUT
from tacit.data.split import FEW_OWN_LABELS

# Where the largest class has ten times the labels of the rarest, a model that never names the rare one is still right
# in ten of eleven of their images: nothing but weights tells it that this matters.
MUCH_RARER = 10
TWICE = 2  # of two classes one has more than half as a rule; that alone is no skew
MOST_NAMED = 10


@dataclass(frozen=True)
class Skew:
    """Labels to train with, by class (those held out for the test are taken off), and test images, where given."""

    labels: Mapping[str, int]
    tested: Mapping[str, int] = field(default_factory=dict)

    @property
    def largest(self) -> str:
        return max(self.labels, key=lambda name: self.labels[name])

    @property
    def share(self) -> float:
        """What always naming one class gives: its share of the test images; if they are held out, of the labels.

        >>> Skew({"nv": 60, "mel": 40}).share, Skew({"nv": 60, "mel": 40}, {"nv": 9, "mel": 1}).share
        (0.6, 0.9)
        """
        counts = self.tested or self.labels
        return max(counts.values(), default=0) / max(sum(counts.values()), 1)

    @property
    def one_sided(self) -> bool:
        """Whether balanced accuracy leads: the largest class has more than half."""
        return self.share > MAJORITY

    @property
    def rarest(self) -> str:
        """The class with the fewest labels, of those that have one."""
        return min((name for name in self.labels if self.labels[name]), key=lambda name: self.labels[name])

    @property
    def weigh(self) -> bool:
        """Whether class weights are worth proposing.

        >>> Skew({"nv": 67, "mel": 11}).weigh, Skew({"a": 40, "b": 35, "c": 4}).weigh
        (True, True)
        >>> Skew({"a": 9, "b": 8, "c": 7}).weigh, Skew({"a": 9, "b": 8}).weigh  # 53 % is hardly a majority
        (False, False)
        """
        if not sum(self.labels.values()):
            return False
        most, least = self.labels[self.largest], self.labels[self.rarest]
        dominant = most > MAJORITY * sum(self.labels.values()) and most >= TWICE * least
        return dominant or most >= MUCH_RARER * least

    @property
    def why_weigh(self) -> str:
        """The reason beside the setting.

        >>> Skew({"nv": 67, "mel": 11}).why_weigh
        'mel has 11 labels, nv 67: rare classes count more'
        """
        rare, common = self.rarest, self.largest
        few, many = self.labels[rare], self.labels[common]
        return f"{safe(rare, 40)} has {few:,} labels, {safe(common, 40)} {many:,}: rare classes count more"

    def remarks(self) -> list[str]:
        """What to say before training.

        >>> first, second = Skew({"nv": 67, "mel": 9}).remarks()
        >>> print(first[:78])
        nv has 88 % of the labels: a model that always names it would be right that of
        >>> print(second[:49])
        Fewer than 10 labels to learn from: mel (9). Such
        """
        found = []
        weights = 'train.class_weights = "balanced" is set in the file, with the reason'
        if self.one_sided:
            counts, of = (self.tested, "test images") if self.tested else (self.labels, "labels")
            name = max(counts, key=lambda name: counts[name])
            found.append(
                f"{safe(name, 60)} has {100 * self.share:.0f} % of the {of}: a model that always names it would be "
                "right that often. Balanced accuracy (the mean of the classes' recalls) therefore leads in all figures"
                + (f", and {weights}." if self.weigh else ".")
            )
        elif self.weigh:
            found.append(f"{self.why_weigh}. So {weights}.")
        few = sorted((n for n in self.labels if self.labels[n] < FEW_OWN_LABELS), key=lambda n: self.labels[n])
        if few:
            named = ", ".join(f"{safe(name, 60)} ({self.labels[name]})" for name in few[:MOST_NAMED])
            more = f" and {len(few) - MOST_NAMED} more" if len(few) > MOST_NAMED else ""
            found.append(
                f"Fewer than {FEW_OWN_LABELS} labels to learn from: {named}{more}. Such a class is learned, and "
                "judged, from very little: label more of it first if it matters."
            )
        return found


def skew_of(labels: Mapping[str, int], tested: Mapping[str, int], classes: list[str]) -> Skew:
    """By labels and test images of each class; without the latter, a part of the labels is held out (`hold_out`).

    >>> skew_of({"a": 10, "b": 2, "c": 1}, {}, ["a", "b", "c"]).labels
    {'a': 8, 'b': 1, 'c': 1}
    """
    given = sum(tested.values()) > 0

    def left(number: int) -> int:
        return number if given else number - min(max(1, round(HELD_OUT * number)), max(number - 1, 0))

    return Skew(
        {name: left(labels.get(name, 0)) for name in classes},
        {name: tested.get(name, 0) for name in classes} if given else {},
    )
