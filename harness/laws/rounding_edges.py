"""Makes rows whose elements are hard to round, to check a codec's kernels against the reference.

A codec divides each element by its block's scale, and rounds the quotient to the nearest *level* (a quotient that has a
code).  The hard elements are those at a tie, halfway between two adjacent levels, and the floats next to a tie.  A
kernel that multiplies by the reciprocal of the scale, instead of dividing, gets some of these elements wrong.  If the
scale is a power of two, even such a kernel gets all of them right.  Therefore most rows have other scales.
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
    """The smallest and the largest element of a block, and the scale that the reference computes from these two."""

    low: float  # smallest element; 0 for symmetric codecs
    high: float  # largest element
    scale: float


def levels(codec: Blocked) -> Tensor:
    """Return a codec's levels in ascending order: (levels,) fp64.

    The levels are the values of ``x / scale`` that the codec can represent exactly.  For an asymmetric codec, they are
    the values of ``(x - low) / scale``, where ``low`` is the block's smallest element.  Zero is always a level.
    """
    if not isinstance(codec, FloatCodec):
        top = codec.largest
        return torch.arange(0.0 if codec.asymmetric else -codec.steps, top + 1, dtype=torch.float64)
    values = reference.float_levels(codec.bits, codec.mantissa, codec.smallest_exponent)
    positive = torch.tensor([level for level in values if level <= codec.largest], dtype=torch.float64)
    return torch.cat([-positive[1:].flip(0), positive])


def edge_rows(codec: Blocked, kind: Dtype, noise: Noise) -> Iterator[Tensor]:
    """Yield rows (S,) of type ``kind`` whose elements lie where the codec's rounding changes; S is below 2400.

    There is one row for each scale in :func:`spans`.  A *level* is a value of ``x / scale`` that the codec can
    represent.  For each two adjacent levels, the row has three elements: the tie (the middle) between the levels, the
    next float towards zero, and the next float away from zero.  Before each of these elements, the row repeats the
    extremes that determine the scale, so that every block of the row gets this scale.  A symmetric codec has one
    extreme, the largest element.  An asymmetric codec has two: the smallest and the largest.

    A stochastic codec's rounding does not change at the tie, but at a value that the random bits ``noise`` determine.
    The row has this value in place of the tie.

    A codec with a Hadamard rotation rotates a row before quantising it.  The row is therefore rotated backwards here,
    so that the codec quantises the intended elements.  A row that is not finite after this rotation is left out.
    """
    for span in spans(replace(codec, block=32, hadamard=0, stochastic=False), kind):
        row = _row(codec, span, kind, noise)
        if codec.hadamard:
            row = (reference.rotated(codec, row) * codec.hadamard).to(row.dtype)
        if bool(row.isfinite().all()):
            yield row


def spans(codec: Blocked, kind: Dtype) -> list[Span]:
    """Return the scales for which :func:`edge_rows` makes rows.

    Each entry also has the smallest and the largest element of a block that gets the scale.

    - A symmetric codec has one entry for each scale in ``_SCALES``.
    - An asymmetric codec has one entry for each pair of a scale in ``_SCALES`` and an offset in ``_OFFSETS``.
    - Every codec has two more entries: one whose scale is the smallest normal number of type ``kind``, and one whose
      largest element is the largest number of type ``kind``.

    If the largest element of a block with one of the scales in ``_SCALES`` is above the largest number of type
    ``kind``, all scales in ``_SCALES`` are multiplied by 2^-8 first.  Scales of type ``e8m0`` are rounded as the
    reference rounds them.
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
    """Return the row that :func:`edge_rows` makes for one scale, before any Hadamard rotation.

    Elements beyond the extremes of ``span`` are clamped to the extremes, because otherwise they change the scale.
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
