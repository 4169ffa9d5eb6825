"""Numbers for people."""

MAJORITY = 0.5  # where one class has more of the images than this, balanced accuracy leads: plain accuracy flatters


def size_text(count: float | None) -> str:
    """Bytes in words.

    >>> size_text(40), size_text(44_700_000), size_text(3.2e12), size_text(None), size_text(5 * 10**21)
    ('40 B', '44.7 MB', '3.2 TB', 'depends', '5000.0 EB')
    """
    if count is None:
        return "depends"
    for unit in ("B", "kB", "MB", "GB", "TB", "PB", "EB"):
        if count < 1000 or unit == "EB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def clock(seconds: float) -> str:
    """A time in words.

    >>> clock(7), clock(125), clock(7300)
    ('7 s', '2:05 min', '2:01 h')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"
