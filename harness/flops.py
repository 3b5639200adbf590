"""Sizes of the GPT presets, and the arithmetic that a training step of them takes.  No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class GPTShape:
    """Sizes of a GPT.

    Attributes:
        layers: transformer blocks.
        width: of the residual stream, h.
        heads: of attention; they divide ``width``.
        vocab: tokens, V; 256 for bytes.
        tied: whether the head shares the embedding's weights.
    """

    layers: int
    width: int
    heads: int
    vocab: int = 256
    tied: bool = False


PRESETS: Final[dict[str, GPTShape]] = {
    "gpt-tiny": GPTShape(layers=2, width=64, heads=2),
    "gpt-small": GPTShape(layers=4, width=256, heads=4),
    "gpt-medium": GPTShape(layers=8, width=512, heads=8),
    "gpt-18b": GPTShape(layers=40, width=6144, heads=32, vocab=50304, tied=True),
    "gpt-100b": GPTShape(layers=80, width=10240, heads=80, vocab=50304, tied=True),
}
"""Models by name.  ``gpt-18b`` is the one of the ZeRO++ tutorial's logs."""


def step_flops(shape: GPTShape, *, sequences: int, length: int, recompute: bool) -> float:
    """Floating-point operations of one forward and backward pass, by Megatron's formula.

    ``96 B s l h^2 (1 + s / 6h + V / 16lh)`` with activations recomputed, 72 without
    (arXiv 2104.04473, section 5.1).

    Args:
        shape: l, h and V.
        sequences: B, of all ranks together.
        length: s, tokens of a sequence.
        recompute: whether the forward pass runs twice.
    """
    layers, width = shape.layers, shape.width
    correction = 1 + length / (6 * width) + shape.vocab / (16 * layers * width)
    return (96 if recompute else 72) * sequences * length * layers * width**2 * correction


def tflops_per_rank(
    shape: GPTShape, *, sequences: int, length: int, recompute: bool, seconds: float, ranks: int
) -> float:
    """Model TFLOP/s of each rank, for a step that took ``seconds``."""
    return step_flops(shape, sequences=sequences, length=length, recompute=recompute) / seconds / ranks / 1e12
