"""The calibration plot as SVG: plain shapes, no script, nothing fetched."""

from collections.abc import Sequence

SIDE, LEFT, TOP = 260, 46, 12
HEIGHT = TOP + SIDE + 44


def calibration_plot(bins: Sequence[Sequence[float]]) -> str:
    """How often predictions are right (a dot) by how sure the model says it is; the larger the dot, the more images.

    Each bin is (images, mean confidence, accuracy). On the diagonal a model is as sure as it should be.
    """
    most = max((count for count, _, _ in bins), default=1)
    marks = []
    for count, sure, right in bins:
        x, y, radius = _x(sure), _y(right), 3 + 7 * (count / most) ** 0.5
        marks.append(
            f'<line x1="{x:.1f}" y1="{_y(sure):.1f}" x2="{x:.1f}" y2="{y:.1f}" stroke="#c60" stroke-width="2"/>'
        )
        marks.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="#1f6fb2" fill-opacity=".75">'
            f"<title>{count:.0f} images: says {100 * sure:.0f} %, right {100 * right:.0f} %</title></circle>"
        )
    grid = []
    for step in (0, 0.25, 0.5, 0.75, 1):
        grid.append(f'<line x1="{_x(step)}" y1="{_y(0)}" x2="{_x(step)}" y2="{_y(1)}" stroke="#e5e5e5"/>')
        grid.append(f'<line x1="{_x(0)}" y1="{_y(step)}" x2="{_x(1)}" y2="{_y(step)}" stroke="#e5e5e5"/>')
        grid.append(_label(_x(step), _y(0) + 16, f"{100 * step:.0f}"))
        grid.append(_label(_x(0) - 6, _y(step) + 4, f"{100 * step:.0f}", "end"))
    diagonal = f'<line x1="{_x(0)}" y1="{_y(0)}" x2="{_x(1)}" y2="{_y(1)}" stroke="#888" stroke-dasharray="4 4"/>'
    upright = f"rotate(-90 12 {TOP + SIDE / 2:.0f})"
    words = [
        _label(_x(0.5), HEIGHT - 6, "confidence, %"),
        f'<g transform="{upright}">{_label(12, TOP + SIDE / 2, "right, %")}</g>',
    ]
    width = LEFT + SIDE + 16
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" height="{HEIGHT}" '
        f'font-family="system-ui,sans-serif" font-size="12"><rect width="{width}" height="{HEIGHT}" fill="#fff"/>'
        f"{''.join([*grid, diagonal, *marks, *words])}</svg>"
    )


def _x(share: float) -> float:
    return LEFT + SIDE * share


def _y(share: float) -> float:
    return TOP + SIDE * (1 - share)


def _label(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="#333">{text}</text>'
