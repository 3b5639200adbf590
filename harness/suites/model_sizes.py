"""Sizes of the preset models, and the FLOPs of a training step of each.  No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

IMAGE_SIDE: Final = 32  # pixels of an image in each direction
IMAGE_CLASSES: Final = 256


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Sizes of a transformer."""

    layers: int  # blocks
    width: int  # of the residual stream, h
    heads: int  # of attention; they divide ``width``


@dataclass(frozen=True, slots=True)
class GPTShape(_Sizes):
    """Sizes of a GPT; ``vocab`` tokens, V, 256 for bytes; ``tied`` if head and embedding share weights."""

    vocab: int = 256
    tied: bool = False


@dataclass(frozen=True, slots=True)
class BERTShape(_Sizes):
    """Sizes of a BERT; of ``vocab`` tokens, V, any may be masked: the mask is one more."""

    vocab: int = 256


@dataclass(frozen=True, slots=True)
class ViTShape(_Sizes):
    """Sizes of a vision transformer; how many patches an image is cut into is the sequence."""


Shape = GPTShape | BERTShape | ViTShape

PRESETS: Final[dict[str, Shape]] = {
    "gpt-tiny": GPTShape(layers=2, width=64, heads=2),
    "gpt-small": GPTShape(layers=4, width=256, heads=4),
    "gpt-medium": GPTShape(layers=8, width=512, heads=8),
    "gpt-1.5b": GPTShape(layers=48, width=1600, heads=16, vocab=50304, tied=True),
    "gpt-10b": GPTShape(layers=50, width=4096, heads=32, vocab=50304, tied=True),
    "gpt-18b": GPTShape(layers=40, width=6144, heads=32, vocab=50304, tied=True),
    "gpt-100b": GPTShape(layers=80, width=10240, heads=80, vocab=50304, tied=True),
    "bert-tiny": BERTShape(layers=2, width=64, heads=2),
    "bert-small": BERTShape(layers=4, width=256, heads=4),
    "vit-tiny": ViTShape(layers=2, width=64, heads=2),
    "vit-small": ViTShape(layers=4, width=256, heads=4),
}
"""Models by name.  ``gpt-1.5b`` and ``gpt-10b`` are those of the ZeRO tutorial, ``gpt-18b`` of ZeRO++'s."""


PATCHES: Final = {(IMAGE_SIDE // side) ** 2: side for side in (32, 16, 8, 4, 2, 1)}
"""Pixels of a patch in each direction, by how many patches an image is cut into."""


def step_flops(shape: Shape, *, sequences: int, length: int, recompute: bool) -> float:
    """Floating-point operations of one forward and backward pass (arXiv 2104.04473, section 5.1).

    Of B ``sequences`` of all ranks together and their ``length`` s, a block takes ``24 B s h^2 (1 + s / 6h)``
    forward, twice that backward, and once more where recomputed; a GPT's logits ``6 B s h V``, a ViT's pixels
    and C classes ``4 B 1024 h + 6 B h C``.
    """
    layers, width = shape.layers, shape.width
    passes = 4 if recompute else 3
    blocks = passes * 24 * sequences * length * layers * width**2 * (1 + length / (6 * width))
    if isinstance(shape, ViTShape):
        return blocks + 4 * sequences * IMAGE_SIDE**2 * width + 6 * sequences * width * IMAGE_CLASSES
    return blocks + 6 * sequences * length * width * shape.vocab
