"""A split as a picture: parties × classes, coloured by the number of images. Pillow only.

Labelled images are orange, with a dark corner in each cell; unlabelled ones are blue. Where a party holds both,
they stand in two panels side by side. Up to 60 clients have rows with numbers; more have thin rows.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from tacit.core.payload import write_atomically
from tacit.core.text import safe
from tacit.data.dataset import Dataset
from tacit.data.split import Split, class_table, party_names, title

LABELED, UNLABELED = (200, 80, 0), (0, 95, 160)  # also told apart by colour-blind readers
INK, GREY, EMPTY, PAPER = (30, 30, 30), (120, 120, 120), (243, 243, 243), (255, 255, 255)
MARGIN, GAP, BAR_WIDTH = 20, 28, 110
MOST_THICK_ROWS, MOST_THIN_ROWS = 61, 1000

Colour = tuple[int, int, int]
LONGEST_NAME = 60  # characters of a class's name


def draw_split(split: Split, dataset: Dataset, path: Path) -> None:
    """Write the picture as a PNG file."""
    file = io.BytesIO()
    picture_of(split, dataset).save(file, "PNG", optimize=True)
    write_atomically(path, file.getvalue())


def picture_of(split: Split, dataset: Dataset) -> Image.Image:
    """The picture itself."""
    rows = rows_of(split, dataset)
    rows = replace(rows, names=[safe(name, LONGEST_NAME) for name in rows.names])
    columns = [*(safe(name, LONGEST_NAME) for name in dataset.classes), *(["(unknown)"] if rows.unknown else [])]
    look = _look(len(rows.names), columns)
    panels = _panels(rows)
    text = safe(title(split)) + (f" (a row: mean of {rows.merged} clients)" if rows.merged > 1 else "")

    grid_width = look.cell_width * len(columns)
    panel_width = grid_width + 12 + BAR_WIDTH
    left = MARGIN + max(_width(name, look.font) for name in rows.names) + 16
    right = left + len(panels) * panel_width + (len(panels) - 1) * GAP
    width = max(right, MARGIN + _width(text, _font(17)), 500) + MARGIN
    top = MARGIN + 34 + (24 if len(panels) > 1 else 0) + look.names_height
    lines = _lines(rows, look, top)
    bottom = lines[-1].bottom

    picture = Image.new("RGB", (width, bottom + 76), PAPER)
    pen = ImageDraw.Draw(picture)
    pen.text((MARGIN, MARGIN), text, INK, _font(17), anchor="la")
    _draw_row_names(pen, rows, look, left, lines)
    for number, panel in enumerate(panels):
        start = left + number * (panel_width + GAP)
        pen.text((start, MARGIN + 34), panel.heading, INK, _font(14), anchor="la")
        _draw_column_names(picture, columns, look, start, top)
        _draw_cells(pen, panel, look, start, lines)
        _draw_totals(pen, panel, look, start + grid_width + 12, lines, int(rows.server))
    _draw_legend(pen, panels[0], MARGIN, bottom + 24)
    return picture


@dataclass(frozen=True)
class Rows:
    """The table to draw: the server (if it holds anything), then the clients or means of several."""

    names: list[str]
    labeled: np.ndarray  # [rows, classes], and one column for unknown labels if there are any
    unlabeled: np.ndarray
    server: bool
    unknown: bool
    merged: int  # clients in a row


@dataclass(frozen=True)
class _Panel:
    heading: str
    counts: np.ndarray
    labeled: np.ndarray  # bool: which cells count labelled images
    most_labeled: float
    most_unlabeled: float


@dataclass(frozen=True)
class _Line:
    """Where a row lies in the picture."""

    top: int
    bottom: int

    @property
    def height(self) -> int:
        return self.bottom - self.top

    @property
    def middle(self) -> int:
        return (self.top + self.bottom) // 2 - 1


@dataclass(frozen=True)
class _Look:
    row_height: int
    cell_width: int
    names_height: int
    upright_names: bool
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont


def rows_of(split: Split, dataset: Dataset, most: int = MOST_THIN_ROWS) -> Rows:
    """Who holds what, in at most so many rows for the clients."""
    labels = np.asarray(dataset.train_labels)
    labeled, unlabeled = class_table(split, labels, len(dataset.classes))
    unknown = np.array([0, *((labels[part.unlabeled] < 0).sum() for part in split.clients)])
    if unknown.any():
        labeled = np.column_stack([labeled, np.zeros_like(unknown)])
        unlabeled = np.column_stack([unlabeled, unknown])
    clients = len(split.clients)
    merged = -(-clients // most)
    starts = np.arange(0, clients, merged)
    sizes = np.diff(starts, append=clients)[:, None]
    named = party_names(split) if merged == 1 else [f"client {number}" for number in range(clients)]
    names = [named[number] for number in starts]
    labeled_rows = np.add.reduceat(labeled[1:], starts, axis=0) / sizes
    unlabeled_rows = np.add.reduceat(unlabeled[1:], starts, axis=0) / sizes
    server = len(split.server) > 0
    if server:
        names = ["server", *names]
        labeled_rows = np.vstack([labeled[:1], labeled_rows])
        unlabeled_rows = np.vstack([unlabeled[:1], unlabeled_rows])
    return Rows(names, labeled_rows, unlabeled_rows, server, bool(unknown.any()), merged)


def _panels(rows: Rows) -> list[_Panel]:
    """One panel where each party is either labelled or not, else one for each kind."""
    most = float(rows.labeled.max(initial=0)), float(rows.unlabeled.max(initial=0))
    has_labels, has_unlabeled = rows.labeled.sum(axis=1) > 0, rows.unlabeled.sum(axis=1) > 0
    if not (has_labels & has_unlabeled).any():
        of_labels = np.repeat(has_labels[:, None], rows.labeled.shape[1], axis=1)
        return [_Panel("", rows.labeled + rows.unlabeled, of_labels, *most)]
    clients = slice(int(rows.server), None)
    repeated = (rows.labeled[clients] <= rows.unlabeled[clients]).all()
    among = " (the labelled images are among them)" if repeated else ""
    yes, no = np.ones(rows.labeled.shape, bool), np.zeros(rows.labeled.shape, bool)
    return [
        _Panel("labelled", rows.labeled, yes, *most),
        _Panel("unlabelled" + among, rows.unlabeled, no, *most),
    ]


def _look(rows: int, columns: Sequence[str]) -> _Look:
    """Sizes that fit the number of rows and columns."""
    thick = rows <= MOST_THICK_ROWS
    row_height = (26 if rows <= 31 else 18) if thick else max(2, 900 // rows)
    font = _font(13 if len(columns) <= 26 else 10)
    longest = max(_width(name, font) for name in columns)
    if len(columns) <= 12:
        cell_width = max(64, min(longest + 8, 84))
    else:
        cell_width = 44 if len(columns) <= 26 else 13
    upright = longest > cell_width - 4
    return _Look(
        row_height=row_height,
        cell_width=cell_width,
        names_height=min(longest, 130) + 10 if upright else 24,
        upright_names=upright,
        font=font,
    )


def _lines(rows: Rows, look: _Look, top: int) -> list[_Line]:
    """The server's row is always high enough for text, and stands a little apart."""
    lines = []
    for row in range(len(rows.names)):
        is_server = rows.server and row == 0
        height = max(look.row_height, 18) if is_server else look.row_height
        lines.append(_Line(top, top + height))
        top += height + (6 if is_server else 0)
    return lines


def _draw_row_names(pen: ImageDraw.ImageDraw, rows: Rows, look: _Look, left: int, lines: list[_Line]) -> None:
    """Every name where rows are thick; where they are thin, as many as have room."""
    steps = (1, 5, 10, 20, 50, 100)
    step = 1 if look.row_height >= 16 else next(step for step in steps if step * look.row_height >= 24)
    for row, (name, line) in enumerate(zip(rows.names, lines, strict=True)):
        if line.height >= 16:
            pen.text((left - 12, line.middle), name, INK, look.font, anchor="rm")
        elif (row - int(rows.server)) % step == 0:
            pen.text((left - 12, line.middle), name, INK, look.font, anchor="rm")
            pen.line([(left - 8, line.middle), (left - 3, line.middle)], GREY)


def _draw_column_names(picture: Image.Image, columns: Sequence[str], look: _Look, start: int, top: int) -> None:
    for column, name in enumerate(columns):
        middle = start + column * look.cell_width + look.cell_width // 2
        if not look.upright_names:
            ImageDraw.Draw(picture).text((middle, top - 10), name, INK, look.font, anchor="ms")
            continue
        while _width(name, look.font) > 130:
            name = name[:-2] + "…"
        strip = Image.new("RGB", (look.names_height, 16), PAPER)
        ImageDraw.Draw(strip).text((8, 8), name, INK, look.font, anchor="lm")
        upright = strip.rotate(90, expand=True)
        picture.paste(upright, (middle - 8, top - upright.height))


def _draw_cells(pen: ImageDraw.ImageDraw, panel: _Panel, look: _Look, start: int, lines: list[_Line]) -> None:
    for row, column in np.ndindex(panel.counts.shape):
        count, labeled, line = float(panel.counts[row, column]), panel.labeled[row, column], lines[row]
        x, y = start + column * look.cell_width, line.top
        rule = 1 if line.height >= 6 else 0  # a white line between rows that are high enough
        colour = _shade(count, panel, bool(labeled))
        pen.rectangle((x, y, x + look.cell_width - 2, line.bottom - 1 - rule), colour)
        if count and labeled and line.height >= 6:
            corner = min(8, line.height // 2)
            pen.polygon([(x, y), (x + corner, y), (x, y + corner)], INK)
        if count and line.height >= 16 and look.cell_width >= 40:
            ink = PAPER if sum(colour) < 400 else INK
            pen.text((x + look.cell_width // 2, line.middle), _number(count), ink, look.font, anchor="mm")


def _draw_totals(
    pen: ImageDraw.ImageDraw, panel: _Panel, look: _Look, start: int, lines: list[_Line], first_client: int
) -> None:
    """A bar for all images of a party, with the number where it has room."""
    pen.text((start, lines[0].top - 10), "in all", GREY, _font(13), anchor="ls")
    totals = np.sum(panel.counts, axis=1)
    most = max(totals[first_client:].max(initial=0), 1)  # the server's bar may be cut off
    for row, (total, line) in enumerate(zip(totals.tolist(), lines, strict=True)):
        length = round((BAR_WIDTH - 50) * min(total / most, 1))
        edge = 4 if line.height >= 12 else 0
        if length:
            box = (start, line.top + edge, start + length, line.bottom - 1 - edge)
            pen.rectangle(box, _mixed(LABELED if panel.labeled[row, 0] else UNLABELED, 1 / 3))
        if line.height >= 16 and total:
            pen.text((start + length + 6, line.middle), _number(total), INK, look.font, anchor="lm")


def _draw_legend(pen: ImageDraw.ImageDraw, panel: _Panel, left: int, top: int) -> None:
    """A ramp for each kind that occurs, with the number of images at its ends."""
    font = _font(13)
    for labeled, name, most in (
        (True, "labelled", panel.most_labeled),
        (False, "unlabelled", panel.most_unlabeled),
    ):
        if not most:
            continue
        pen.text((left, top + 8), name, INK, font, anchor="lm")
        left += _width(name, font) + 10
        for step in range(120):
            x = left + step
            pen.line([(x, top), (x, top + 16)], _shade(most * (step + 1) / 120, panel, labeled))
        if labeled:
            pen.polygon([(left, top), (left + 8, top), (left, top + 8)], INK)
        pen.text((left, top + 22), "few", GREY, font, anchor="lt")
        pen.text((left + 120, top + 22), f"{_number(most)} images", GREY, font, anchor="mt")
        left += 120 + 70


def _shade(count: float, panel: _Panel, labeled: bool) -> Colour:
    """From nearly white (few) to the full colour (most); by the root, so that a few images still show."""
    if not count:
        return EMPTY
    most, colour = (panel.most_labeled, LABELED) if labeled else (panel.most_unlabeled, UNLABELED)
    return _mixed(colour, 0.12 + 0.88 * (count / most) ** 0.5)


def _mixed(colour: Colour, strength: float) -> Colour:
    """The colour on white paper, as strong as asked (0 to 1)."""
    red, green, blue = (round(255 - (255 - value) * strength) for value in colour)
    return red, green, blue


def _number(count: float) -> str:
    return f"{round(count, 1):g}" if count < 10_000 else f"{count:.0f}"


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _width(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> int:
    return int(font.getlength(text)) + 1
