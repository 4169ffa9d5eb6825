"""Which figure stands first: accuracy, unless one class has more than half of the test images.

There a model that always names that class looks good, so balanced accuracy (the mean of the classes' recalls) leads,
and what that model would reach stands beside it.
"""

from collections.abc import Mapping
from typing import Any

from tacit.core.formatting import MAJORITY


def leads(record: Mapping[str, Any]) -> str:
    """The key of the figure that stands first in a record or a summary.

    >>> leads({"accuracy": 0.9}), leads({"accuracy": 0.7, "balanced_accuracy": 0.5, "largest_class": 0.67})
    ('accuracy', 'balanced_accuracy')
    """
    one_sided = (record.get("largest_class") or 0.0) > MAJORITY and record.get("balanced_accuracy") is not None
    return "balanced_accuracy" if one_sided else "accuracy"


def headline(record: Mapping[str, Any], digits: int = 1) -> str:
    """The first figure in words; '' where nothing was evaluated.

    >>> headline({"accuracy": 0.912})
    'accuracy 91.2 %'
    >>> headline({"accuracy": 0.7, "balanced_accuracy": 0.5, "largest_class": 0.67})
    'balanced accuracy 50.0 % (accuracy 70.0 %, always the largest class: 67.0 %)'
    """
    if record.get("accuracy") is None:
        return ""
    plain = f"accuracy {100 * record['accuracy']:.{digits}f} %"
    if leads(record) == "accuracy":
        return plain
    always = f"always the largest class: {100 * record['largest_class']:.{digits}f} %"
    return f"balanced accuracy {100 * record['balanced_accuracy']:.{digits}f} % ({plain}, {always})"
