"""Makes a data set of labelled images for vision models: characters in twelve fonts of matplotlib.

The data set needs no download, since matplotlib brings the DejaVu fonts.  A class is a character.  The classes are the
256 characters with the lowest code points that all fonts have and that look different from one another in the first
font.  An item is a character in one font.  About one item in twenty, chosen by a hash, is for validation.  This module
does not import torch.
"""

from __future__ import annotations

import hashlib
import unicodedata
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.suites.model_sizes import IMAGE_CLASSES, IMAGE_SIDE
from harness.workloads.dataset import Dataset, Pair, draw

GLYPHS: Final = "glyphs"
VALIDATION_EVERY: Final = 20  # one item in so many is held out for validation
_PIXELS: Final = 20  # font size; the largest glyph is then 26 pixels high, and fits an image
_FONTS: Final = tuple(
    f"DejaVu{name}.ttf"
    for name in (
        "Sans", "Sans-Bold", "Sans-BoldOblique", "Sans-Oblique",
        "SansMono", "SansMono-Bold", "SansMono-BoldOblique", "SansMono-Oblique",
        "Serif", "Serif-Bold", "Serif-BoldItalic", "Serif-Italic",
    )
)  # fmt: skip


class Item(NamedTuple):
    """One character in one font."""

    font: str  # file name
    character: int  # code point
    label: int  # number of the character's class, from 0


class Glyphs(Dataset):
    """Images of characters: (B, 32, 32) float32 inputs from 0 to 1, and (B,) int64 classes as targets."""

    def __init__(self, sha256: str, train: list[Item], validation: list[Item]) -> None:
        self.sha256, self.train, self.validation = sha256, train, validation

    def at(self, part: list[Item], numbers: list[int], keys: list[str]) -> Pair:
        """Return images of the items ``numbers`` of a part, and their classes.

        The hash of an image's key determines where in the image the character is.
        """
        items = [part[number] for number in numbers]
        images = np.zeros((len(items), IMAGE_SIDE, IMAGE_SIDE), dtype=np.float32)
        for image, item, key in zip(images, items, keys, strict=True):
            glyph = _glyph(item.font, item.character)
            height, width = glyph.shape
            top = draw(f"{key}/top", IMAGE_SIDE - height + 1)
            left = draw(f"{key}/left", IMAGE_SIDE - width + 1)
            image[top : top + height, left : left + width] = glyph / np.float32(255)
        return images, np.array([item.label for item in items], dtype=np.int64)


@cache
def load() -> Glyphs:
    """Make the data set in the first call, which takes a tenth of a second; later calls return the same object."""
    from matplotlib import ft2font

    characters = _characters()
    splits: tuple[list[Item], list[Item]] = ([], [])
    for font in _FONTS:
        for label, character in enumerate(characters):
            held_out = draw(f"{font}/{character:x}", VALIDATION_EVERY) == 0
            splits[held_out].append(Item(font, character, label))
    # The digest includes the version of FreeType, since another version may draw a character with other pixels.
    drawing = (characters, IMAGE_SIDE, _PIXELS, str(ft2font.__freetype_version__))
    whole = b"".join([*(_path(font).read_bytes() for font in _FONTS), repr(drawing).encode()])
    return Glyphs(hashlib.sha256(whole).hexdigest(), *splits)


def _characters() -> tuple[int, ...]:
    """Return the code points of the data set's 256 classes, in ascending order.

    The classes are the first characters that all fonts have, without spaces, control characters and lone accents.  If
    several characters have equal images in the first font, only the first of them is a class.
    """
    from matplotlib.ft2font import FT2Font

    shared = set.intersection(*(set(FT2Font(str(_path(font))).get_charmap()) for font in _FONTS))
    different: dict[tuple[tuple[int, ...], bytes], int] = {}
    for character in sorted(shared):
        if unicodedata.category(chr(character))[0] in "CZM":  # control characters, spaces, lone accents
            continue
        glyph = _glyph(_FONTS[0], character)
        different.setdefault((glyph.shape, glyph.tobytes()), character)
        if len(different) == IMAGE_CLASSES:
            break
    return tuple(different.values())


def _path(font: str) -> Path:
    import matplotlib as mpl

    return Path(mpl.get_data_path()) / "fonts" / "ttf" / font


@cache
def _glyph(font: str, character: int) -> NDArray[np.uint8]:
    """Render a character as (height, width) grey levels from 0 to 255, without margins."""
    from matplotlib.ft2font import FT2Font

    drawn = FT2Font(str(_path(font)))
    drawn.set_size(_PIXELS, 72)  # at 72 dots per inch a point is a pixel
    drawn.set_text(chr(character), 0.0)
    drawn.draw_glyphs_to_bitmap(antialiased=True)
    return np.array(drawn.get_image(), dtype=np.uint8)
