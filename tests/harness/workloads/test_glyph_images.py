"""Images of characters."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from harness.suites.model_sizes import IMAGE_CLASSES
from harness.workloads import glyph_images


@pytest.fixture(scope="module")
def glyphs() -> glyph_images.Glyphs:
    return glyph_images.load()


def test_items_are_cut_once(glyphs: glyph_images.Glyphs) -> None:
    """No item is in both splits; every class is trained in most fonts, and some items are held out."""
    assert not set(glyphs.train) & set(glyphs.validation)
    assert len(glyphs.train) + len(glyphs.validation) == 12 * IMAGE_CLASSES
    fonts = Counter(item.label for item in glyphs.train)
    assert set(fonts) == set(range(IMAGE_CLASSES))
    assert min(fonts.values()) >= 6
    assert 0.03 < len(glyphs.validation) / (12 * IMAGE_CLASSES) < 0.07


def test_a_class_looks_like_no_other(glyphs: glyph_images.Glyphs) -> None:
    """In the first font no two classes have the same picture, and no picture is empty."""
    font = glyphs.train[0].font
    pictures = {
        item.label: glyph_images._glyph(font, item.character)
        for item in (*glyphs.train, *glyphs.validation)
        if item.font == font
    }
    assert len(pictures) == IMAGE_CLASSES
    assert len({(picture.shape, picture.tobytes()) for picture in pictures.values()}) == IMAGE_CLASSES
    assert all(picture.any() for picture in pictures.values())


def test_an_image_shows_its_class(glyphs: glyph_images.Glyphs) -> None:
    """What is drawn is a character of the label's class in one of the fonts, whole and nothing else."""
    shapes: dict[int, list[np.ndarray]] = {}
    images, labels = glyphs.batch(seed=3, step=0, micro_batch=0, rank=0, sequences=32)
    drawn_labels = set(labels.tolist())
    for item in (*glyphs.train, *glyphs.validation):
        if item.label in drawn_labels:
            shapes.setdefault(item.label, []).append(trimmed(glyph_images._glyph(item.font, item.character)))
    for image, label in zip(images, labels, strict=True):
        drawn = trimmed((image * 255).round().astype(np.uint8))
        assert any(np.array_equal(drawn, shape) for shape in shapes[int(label)])


def trimmed(picture: np.ndarray) -> np.ndarray:
    """A picture without its empty margins."""
    rows, columns = np.flatnonzero(picture.any(1)), np.flatnonzero(picture.any(0))
    return picture[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
