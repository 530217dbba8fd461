"""One picture of many: labeled rows, named columns, a title; and such pictures one below the other."""

from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

CELL = 128  # pixels; a smaller image is enlarged by a whole factor, without smoothing
GAP = 6
MARGIN = 140
HEADER = 32


def _tile(image: np.ndarray) -> Image.Image:
    """A (height, width, 3) float image as a square of CELL pixels, or its own size where it is larger than that."""
    tile = Image.fromarray((image.clip(0, 1) * 255).round().astype(np.uint8))
    factor = max(1, CELL // max(tile.size))
    if max(tile.size) > 2 * CELL:
        tile.thumbnail((2 * CELL, 2 * CELL))
    return tile.resize((tile.width * factor, tile.height * factor), Image.Resampling.NEAREST)


def contact_sheet(rows: Mapping[str, Sequence[np.ndarray]], columns: Sequence[str], title: str = "") -> Image.Image:
    """Draws every row of images under the column names, its label at the left; the title is left of the names."""
    tiles = {label: [_tile(image) for image in images] for label, images in rows.items()}
    every = [tile for line in tiles.values() for tile in line]
    width, height = max(tile.width for tile in every) + GAP, max(tile.height for tile in every) + GAP
    sheet = Image.new("RGB", (MARGIN + len(columns) * width, HEADER + len(tiles) * height), "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(size=18)
    draw.text((GAP, HEADER / 2), title, "black", font, anchor="lm")
    for number, name in enumerate(columns):
        draw.text((MARGIN + number * width + (width - GAP) / 2, HEADER / 2), name, "black", font, anchor="mm")
    for line, (label, images) in enumerate(tiles.items()):
        top = HEADER + line * height
        draw.text((GAP, top + (height - GAP) / 2), label, "black", font, anchor="lm")
        for number, tile in enumerate(images):
            sheet.paste(tile, (MARGIN + number * width, top))
    return sheet


def stack_sheets(sheets: Sequence[Image.Image]) -> Image.Image:
    """The pictures one below the other, on white."""
    whole = Image.new("RGB", (max(sheet.width for sheet in sheets), sum(sheet.height for sheet in sheets)), "white")
    top = 0
    for sheet in sheets:
        whole.paste(sheet, (0, top))
        top += sheet.height
    return whole
