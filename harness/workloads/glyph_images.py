"""Labelled images for vision models: characters rendered in the fonts that ship with matplotlib.

Twelve DejaVu fonts (sans, mono and serif, upright and slanted, regular and bold) share some two
thousand characters.  The classes are the first 256 of them, by code point, that look different from
one another.  One item is a character of one font; an image is an item drawn at some offset in the
picture.  Every twentieth item, by hash, is for validation, so a character is validated in fonts in
which it was never trained.  Nothing is downloaded, and no draw depends on an earlier one.
No torch.
"""

from __future__ import annotations

import hashlib
import unicodedata
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from harness.suites.model_sizes import IMAGE_CLASSES, IMAGE_SIDE
from harness.workloads.corpus import draw, spread

GLYPHS: Final = "glyphs"
VALIDATION_EVERY: Final = 20  # one item in so many
_PIXELS: Final = 20  # size of the fonts; the largest glyph is then 26 pixels high
_FONTS: Final = tuple(
    f"DejaVu{name}.ttf"
    for name in (
        "Sans", "Sans-Bold", "Sans-BoldOblique", "Sans-Oblique",
        "SansMono", "SansMono-Bold", "SansMono-BoldOblique", "SansMono-Oblique",
        "Serif", "Serif-Bold", "Serif-BoldItalic", "Serif-Italic",
    )
)  # fmt: skip

Images = NDArray[np.float32]
Labels = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Item:
    """One character of one font: ``label`` is its class, ``character`` its code point."""

    font: str
    character: int
    label: int


@dataclass(frozen=True, slots=True)
class Glyphs:
    """Rendered characters, split into items for training and for validation.

    Attributes:
        sha256: of the fonts' files, the characters and how they are drawn.
        train: items.
        validation: items; no item is in both.
    """

    sha256: str
    train: tuple[Item, ...]
    validation: tuple[Item, ...]

    def batch(
        self, *, seed: int, step: int, micro_batch: int, rank: int, sequences: int
    ) -> tuple[Images, Labels]:
        """Training images of one micro-batch of one rank, which depend on the arguments alone.

        Args:
            seed: of the trial.
            step: optimizer step, warm-ups included, from 0.
            micro_batch: index within the step.
            rank: global rank.
            sequences: images to draw, B.

        Returns:
            (B, 32, 32) float32 from 0 to 1, and (B,) int64 classes.
        """
        keys = [f"{seed}/{step}/{micro_batch}/{rank}/{index}" for index in range(sequences)]
        return _pictures([self.train[draw(key, len(self.train))] for key in keys], keys)

    def validation_batches(
        self, *, batches: int, rank: int, world: int, sequences: int
    ) -> list[tuple[Images, Labels]]:
        """Images spread evenly over the validation items, dealt to the ranks; seed and step do not matter.

        Args:
            batches: per rank.
            rank: whose.
            world: number of ranks.
            sequences: images in a batch, B.

        Returns:
            ``batches`` pairs as :meth:`batch` returns.
        """
        found = []
        for batch in range(batches):
            first = (batch * world + rank) * sequences
            numbers = range(first, first + sequences)
            places = [spread(number, batches * world * sequences, len(self.validation)) for number in numbers]
            items = [self.validation[place] for place in places]
            found.append(_pictures(items, [f"validation/{number}" for number in numbers]))
        return found


@cache
def load() -> Glyphs:
    """Render the data set; cached, the first call in a process takes a tenth of a second."""
    characters = _characters()
    items = [
        Item(font, character, label)
        for font in _FONTS
        for label, character in enumerate(characters)
    ]  # fmt: skip
    held_out = [draw(f"{item.font}/{item.character:x}", VALIDATION_EVERY) == 0 for item in items]
    digest = hashlib.sha256()
    for font in _FONTS:
        digest.update(_path(font).read_bytes())
    digest.update(repr((characters, IMAGE_SIDE, _PIXELS, _freetype())).encode())
    return Glyphs(
        digest.hexdigest(),
        tuple(item for item, out in zip(items, held_out, strict=True) if not out),
        tuple(item for item, out in zip(items, held_out, strict=True) if out),
    )


def _characters() -> tuple[int, ...]:
    """Code points of the classes: in every font, and drawn unlike every earlier one in the first font."""
    from matplotlib.ft2font import FT2Font

    shared = set.intersection(*(set(FT2Font(str(_path(font))).get_charmap()) for font in _FONTS))
    different: dict[tuple[tuple[int, ...], bytes], int] = {}
    for character in sorted(shared):
        if unicodedata.category(chr(character))[0] in "CZM":  # nothing to see, or an accent alone
            continue
        glyph = _glyph(_FONTS[0], character)
        different.setdefault((glyph.shape, glyph.tobytes()), character)
        if len(different) == IMAGE_CLASSES:
            break
    return tuple(different.values())


def _path(font: str) -> Path:
    import matplotlib as mpl

    return Path(mpl.get_data_path()) / "fonts" / "ttf" / font


def _freetype() -> str:
    """Version of FreeType, which renders the glyphs: another version may set other pixels."""
    from matplotlib import ft2font

    return str(ft2font.__freetype_version__)


@cache
def _glyph(font: str, character: int) -> NDArray[np.uint8]:
    """(height, width) grey levels of a character, without margins."""
    drawn = _opened(font)
    drawn.set_text(chr(character), 0.0)
    drawn.draw_glyphs_to_bitmap(antialiased=True)
    return np.array(drawn.get_image(), dtype=np.uint8)


@cache
def _opened(font: str):  # type: ignore[no-untyped-def]  # noqa: ANN202  # matplotlib is imported inside
    from matplotlib.ft2font import FT2Font

    opened = FT2Font(str(_path(font)))
    opened.set_size(_PIXELS, 72)  # at 72 dots per inch a point is a pixel
    return opened


def _pictures(items: list[Item], keys: list[str]) -> tuple[Images, Labels]:
    """Draw each item into its picture, at an offset that follows from its key."""
    images = np.zeros((len(items), IMAGE_SIDE, IMAGE_SIDE), dtype=np.float32)
    for image, item, key in zip(images, items, keys, strict=True):
        glyph = _glyph(item.font, item.character)
        height, width = glyph.shape
        top, left = draw(f"{key}/top", IMAGE_SIDE - height + 1), draw(f"{key}/left", IMAGE_SIDE - width + 1)
        image[top : top + height, left : left + width] = glyph / np.float32(255)
    return images, np.array([item.label for item in items], dtype=np.int64)
