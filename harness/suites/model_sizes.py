"""Lists the sizes of the preset models, and counts the FLOPs of their training steps.

This module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MOST_LAYERS: Final = 1000  # largest number of layers of a preset model; published models have at most 128
IMAGE_SIDE: Final = 32  # pixels of an image in each direction
IMAGE_CLASSES: Final = 256


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Sizes that all transformers have."""

    layers: int  # number of blocks
    width: int  # width of the residual stream, h
    heads: int  # number of attention heads; a divisor of ``width``


@dataclass(frozen=True, slots=True)
class GPTShape(_Sizes):
    """Sizes of a GPT."""

    vocab: int = 256  # number of different tokens, V; 256 if a token is a byte
    tied: bool = False  # whether head and embedding share their weights


@dataclass(frozen=True, slots=True)
class BERTShape(_Sizes):
    """Sizes of a BERT."""

    vocab: int = 256  # number of different tokens, V, without the mask token


@dataclass(frozen=True, slots=True)
class ViTShape(_Sizes):
    """Sizes of a vision transformer; a trial's ``sequence`` is the number of patches of an image."""


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
"""Models by name.  ``gpt-1.5b`` and ``gpt-10b`` are the ZeRO tutorial's, ``gpt-18b`` is the ZeRO++ tutorial's."""


PATCHES: Final = {(IMAGE_SIDE // side) ** 2: side for side in (32, 16, 8, 4, 2, 1)}
"""Side of a patch in pixels, by the number of patches that an image is cut into."""


def step_flops(shape: Shape, *, sequences: int, length: int, recompute: bool) -> float:
    """Count the floating-point operations of one forward and backward pass (arXiv 2104.04473, section 5.1).

    With B sequences of s tokens, hidden size h and V tokens in the vocabulary, these are the operations:

    - forward pass of one block: ``24 B s h^2 (1 + s / 6h)``; backward pass of one block: twice as many;
    - logits of a GPT or BERT, in both passes together: ``6 B s h V``;
    - patch embedding of a ViT, in both passes together: ``4 B 1024 h``;
    - logits of a ViT with its C = 256 classes, in both passes together: ``6 B h C``.

    Args:
        shape: Sizes of the model, such as h and V.
        sequences: B, the number of sequences of all ranks together.
        length: s, the number of tokens (or patches) of a sequence.
        recompute: Whether the backward pass runs the blocks' forward pass again (activation checkpointing).
    """
    layers, width = shape.layers, shape.width
    passes = 4 if recompute else 3
    blocks = passes * 24 * sequences * length * layers * width**2 * (1 + length / (6 * width))
    if isinstance(shape, ViTShape):
        return blocks + 4 * sequences * IMAGE_SIDE**2 * width + 6 * sequences * width * IMAGE_CLASSES
    return blocks + 6 * sequences * length * width * shape.vocab
