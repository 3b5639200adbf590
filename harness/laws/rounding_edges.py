"""Rows at a codec's rounding edges: for every two adjacent levels their tie, and the floats beside it.

Where scales are powers of two, ties stay ties however a quotient is computed.  At the scales of these rows a
product with a reciprocal gives another code than the quotient ``x / scale``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Final, NamedTuple

import torch
from torch import Tensor

from impl.codecs import reference
from impl.codecs.codec import LARGEST, SMALLEST_NORMAL, Blocked, Dtype, FloatCodec
from impl.codecs.reference import DTYPES, of_e8m0, to_e8m0
from impl.codecs.rounding_noise import Noise

# At one or another of these a product with a reciprocal is wrong beside some level, for every codec and type.
_SCALES: Final = (1.0, 3.0, 15.0, 25.0, 29.0, math.sqrt(5.0))
_OFFSETS: Final = (0.0, -1.0, -0.53)  # of asymmetric codecs: the least element, in parts of the range
_LEAST_DRAWN: Final = 60  # edges of a row with random bits
_BITS: Final = {4: torch.int32, 2: torch.int16}
_CPU: Final = torch.device("cpu")


class Span(NamedTuple):
    """Extremes of blocks, and their scale as the reference takes it; low is 0 of symmetric codecs."""

    low: float
    high: float
    scale: float


def levels(codec: Blocked) -> Tensor:
    """(levels,) fp64, ascending: the quotients that have a code of their own, zero included."""
    if not isinstance(codec, FloatCodec):
        top = codec.largest
        return torch.arange(0.0 if codec.asymmetric else -codec.steps, top + 1, dtype=torch.float64)
    values = reference.float_levels(codec.bits, codec.mantissa, codec.smallest_exponent)
    positive = torch.tensor([level for level in values if level <= codec.largest], dtype=torch.float64)
    return torch.cat([-positive[1:].flip(0), positive])


def edge_rows(codec: Blocked, kind: Dtype, noise: Noise) -> Iterator[Tensor]:
    """Rows (S,) of type ``kind``, S below 2400: for any two levels the tie, the float below and that above,
    each beside the elements that make the block's scale.  With random bits a tie is where ``noise`` turns the
    rounding; with a rotation it is a tie after it.
    """
    for span in spans(replace(codec, block=32, hadamard=0, stochastic=False), kind):
        row = _row(codec, span, kind, noise)
        if codec.hadamard:
            row = (reference.rotated(codec, row) * codec.hadamard).to(row.dtype)
        if bool(row.isfinite().all()):
            yield row


def spans(codec: Blocked, kind: Dtype) -> list[Span]:
    """Spans with scale 1, with scales where product and quotient differ, and with the extreme scales."""
    small = 2.0**-8 if codec.steps * max(_SCALES) > LARGEST[kind] else 1.0
    ranges = torch.tensor(_SCALES) * codec.steps * small
    parts = torch.tensor(_OFFSETS if codec.asymmetric else _OFFSETS[:1])
    low = torch.outer(parts, ranges).flatten().to(DTYPES[kind]).float()
    high = (ranges.repeat(len(parts)) + low).to(DTYPES[kind]).float()
    least = SMALLEST_NORMAL if kind != "fp16" else 2.0**-14
    ends = torch.tensor([least * codec.steps, LARGEST[kind]]).to(DTYPES[kind]).float()
    low, high = torch.cat([low, torch.zeros(2)]), torch.cat([high, ends])
    top = torch.full_like(high, codec.steps)
    scale = (high / top - low / top).clamp(min=SMALLEST_NORMAL)  # as impl.codecs.reference says
    scale = of_e8m0(to_e8m0(scale)) if codec.scale == "e8m0" else scale
    return list(map(Span, low.tolist(), high.tolist(), scale.tolist()))


def _row(codec: Blocked, span: Span, kind: Dtype, noise: Noise) -> Tensor:
    """Elements below, at and above each tie of a quotient, held to the span, each after its scale's."""
    anchors = [span.low, span.high] if codec.asymmetric else [span.high]
    period, quotients = len(anchors) + 1, levels(codec).repeat_interleave(3)
    gaps, ties = quotients[3:] - quotients[:-3], (quotients[3:] + quotients[:-3]) / 2
    if codec.stochastic:
        often = -(-_LEAST_DRAWN // len(ties))  # few levels are tried with more random bits
        gaps, ties = gaps.repeat(often), ties.repeat(often)
        numel = period * len(ties)
        random = reference.random_bits(noise, torch.Size([]), numel, _CPU)[period - 1 :: period]
        ties = ties - gaps * (random.double() * 2.0**-16 - (0.5 - 2.0**-17))
    x = (span.low + ties * span.scale).clamp(-LARGEST[kind], LARGEST[kind]).to(DTYPES[kind])
    bits = x.view(_BITS[x.element_size()])
    turn = torch.arange(len(ties)) % 3 - 1  # to the next number towards zero, itself, the next away from zero
    edges = torch.where((x == 0) & (turn < 0), bits, bits + turn).to(bits.dtype).view(x.dtype)
    low = span.low if codec.asymmetric else -span.high
    edges = edges.float().nan_to_num(0.0).clamp(low, span.high)
    columns = [torch.full_like(edges, anchor) for anchor in anchors]
    return torch.stack([*columns, edges], dim=1).flatten().to(DTYPES[kind])
