"""Makes rows of elements at which a codec's rounding is likely to go wrong, to check kernels against the reference.

Rounding goes wrong at the tie between two adjacent levels (quotients of element and scale that have a code), and at the
floats next to the tie.  Such rows find kernels that multiply by a reciprocal where the specification divides.  If the
scale is a power of two, multiplying and dividing give the same codes.  Most rows therefore have other scales, at which
some codes differ.
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

# For every codec and type, multiplying by a reciprocal gives a wrong code at one or more of these scales.
_SCALES: Final = (1.0, 3.0, 15.0, 25.0, 29.0, math.sqrt(5.0))
_OFFSETS: Final = (0.0, -1.0, -0.53)  # smallest element for asymmetric codecs, as a multiple of the range
_LEAST_DRAWN: Final = 60  # least number of edges in a row for a stochastic codec
_BITS: Final = {4: torch.int32, 2: torch.int16}
_CPU: Final = torch.device("cpu")


class Span(NamedTuple):
    """The extremes of a block, and the scale that the reference computes from them."""

    low: float  # smallest element; 0 for symmetric codecs
    high: float  # largest element
    scale: float


def levels(codec: Blocked) -> Tensor:
    """Return (levels,) fp64: all quotients ``x / scale`` that have a code, zero included, in ascending order."""
    if not isinstance(codec, FloatCodec):
        top = codec.largest
        return torch.arange(0.0 if codec.asymmetric else -codec.steps, top + 1, dtype=torch.float64)
    values = reference.float_levels(codec.bits, codec.mantissa, codec.smallest_exponent)
    positive = torch.tensor([level for level in values if level <= codec.largest], dtype=torch.float64)
    return torch.cat([-positive[1:].flip(0), positive])


def edge_rows(codec: Blocked, kind: Dtype, noise: Noise) -> Iterator[Tensor]:
    """Yield rows (S,) of type ``kind`` whose elements lie at the codec's rounding edges; S is below 2400.

    There is one row for each span of :func:`spans`.  A span is a block's smallest and largest element, which determine
    the block's scale.  The row has three edges for each two adjacent levels: the tie between them, the next float
    towards zero, and the next float away from zero.  Before each edge, the row repeats the two extremes, so that every
    block of the row has the span's scale.

    For a stochastic codec, the value at which the random bits ``noise`` change the rounding takes the place of the tie.
    For a codec with a rotation, rows are rotated beforehand, so that the codec's rotation restores the edges.
    """
    for span in spans(replace(codec, block=32, hadamard=0, stochastic=False), kind):
        row = _row(codec, span, kind, noise)
        if codec.hadamard:
            row = (reference.rotated(codec, row) * codec.hadamard).to(row.dtype)
        if bool(row.isfinite().all()):
            yield row


def spans(codec: Blocked, kind: Dtype) -> list[Span]:
    """Return the spans for which :func:`edge_rows` makes rows: extremes of a block with the scale that they determine.

    For a symmetric codec, there is one span for each scale in ``_SCALES``.  For an asymmetric codec, there is one span
    for each of these scales with each offset in ``_OFFSETS``.  Two more spans follow: the first has the smallest normal
    number of ``kind`` as its scale, the second has the largest number of ``kind`` as its largest element.
    """
    small = 2.0**-8 if codec.steps * max(_SCALES) > LARGEST[kind] else 1.0
    ranges = torch.tensor(_SCALES) * codec.steps * small
    parts = torch.tensor(_OFFSETS if codec.asymmetric else _OFFSETS[:1])
    low = torch.outer(parts, ranges).flatten().to(DTYPES[kind]).float()
    high = (ranges.repeat(len(parts)) + low).to(DTYPES[kind]).float()
    least = SMALLEST_NORMAL if kind != "fp16" else 2.0**-14
    ends = torch.tensor([least * codec.steps, LARGEST[kind]]).to(DTYPES[kind]).float()
    low, high = torch.cat([low, torch.zeros(2)]), torch.cat([high, ends])
    top = torch.full_like(high, codec.steps)
    scale = (high / top - low / top).clamp(min=SMALLEST_NORMAL)  # as impl.codecs.reference computes it
    scale = of_e8m0(to_e8m0(scale)) if codec.scale == "e8m0" else scale
    return list(map(Span, low.tolist(), high.tolist(), scale.tolist()))


def _row(codec: Blocked, span: Span, kind: Dtype, noise: Noise) -> Tensor:
    """Return the row of :func:`edge_rows` for one span, before any rotation.

    Edges beyond the span's extremes are clamped to them, since larger elements would change the scale.
    """
    anchors = [span.low, span.high] if codec.asymmetric else [span.high]
    period, quotients = len(anchors) + 1, levels(codec).repeat_interleave(3)
    gaps, ties = quotients[3:] - quotients[:-3], (quotients[3:] + quotients[:-3]) / 2
    if codec.stochastic:
        often = -(-_LEAST_DRAWN // len(ties))  # codecs with few levels try each tie with several random bits
        gaps, ties = gaps.repeat(often), ties.repeat(often)
        numel = period * len(ties)
        random = reference.random_bits(noise, torch.Size([]), numel, _CPU)[period - 1 :: period]
        ties = ties - gaps * (random.double() * 2.0**-16 - (0.5 - 2.0**-17))
    x = (span.low + ties * span.scale).clamp(-LARGEST[kind], LARGEST[kind]).to(DTYPES[kind])
    bits = x.view(_BITS[x.element_size()])
    turn = torch.arange(len(ties)) % 3 - 1  # -1: next float towards zero, 0: the tie, 1: next away from zero
    edges = torch.where((x == 0) & (turn < 0), bits, bits + turn).to(bits.dtype).view(x.dtype)
    low = span.low if codec.asymmetric else -span.high
    edges = edges.float().nan_to_num(0.0).clamp(low, span.high)
    columns = [torch.full_like(edges, anchor) for anchor in anchors]
    return torch.stack([*columns, edges], dim=1).flatten().to(DTYPES[kind])
