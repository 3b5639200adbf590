"""Generates rows (1-D tensors) that codecs are likely to get wrong, and finds the smallest row that breaks a law.

A law is a property that a codec declares.  Fixed rows are tried first: they hold what codecs are known to get wrong,
such as ties (midpoints between two representable values), the floats next to ties, and blocks of different scales.
Then Hypothesis draws rows.  A row that breaks a law is made smaller by delta debugging: elements are removed as long as
the remaining row still breaks the law.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from random import Random
from typing import Final, NamedTuple, get_args

import hypothesis
import torch
from hypothesis import strategies as st
from hypothesis.errors import Flaky, NoSuchExample
from torch import Tensor

from harness.laws import ELEMENTS
from harness.laws.laws import Case, Claim, Duty, Subject, Violation, attempt, place, title
from harness.laws.rounding_edges import edge_rows, levels
from harness.laws.searching import search_settings
from impl.codecs.codec import LARGEST, SMALLEST_NORMAL, Block, Blocked, Dtype, FloatCodec, Law
from impl.codecs.reference import DTYPES
from impl.codecs.rounding_noise import OCTET, Noise
from impl.errors import raised

LONGEST: Final = 5000  # elements of a drawn row, at most
_LARGEST: Final = LARGEST["fp32"]
_EDGES: Final = [
    0.0, 1.0, -1.0, -0.0, 0.5, 2.0, 1.5, 2.5, 1e-20, SMALLEST_NORMAL, -SMALLEST_NORMAL,
    2.0**-149, -(2.0**-149), 65504.0, 1e30, _LARGEST, -_LARGEST,
]  # fmt: skip
_SIMPLE: Final = [[0.0], [1.0], [-1.0], [1.0, 0.5], [1.0, -0.5], [1.0, -1.0]]
MOST_TRIED: Final = 400  # most attempts to leave out a part of a row while the row is made smaller
_BROKEN: Final = [float("nan"), float("inf"), float("-inf")]

_numbers = st.one_of(
    st.sampled_from(_EDGES),
    st.integers(-127, 127).map(float),
    st.floats(-8.0, 8.0, width=32),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
)
noises = st.builds(
    Noise, st.tuples(*[st.integers(0, 2**32 - 1)] * 4), st.integers(0, 2**40).map(lambda octet: octet * OCTET)
)


# Pairs of a codec's largest level and the ties between its levels: for integer codecs with 2 to 8 bits, with and
# without an offset, and for float codecs.
_FLOATS: Final = (FloatCodec("e2m1", 32, "e8m0"), FloatCodec("e4m3", 32), FloatCodec("e5m2", 32))
_TIES: Final = [
    *((float(top), torch.arange(-top, top) + 0.5) for top in (1, 3, 7, 15, 31, 63, 127, 255)),
    *((codec.largest, levels(codec).float().unfold(0, 2, 1).mean(1)) for codec in _FLOATS),
]
# Rows of the largest value and a few ties after it.  The largest value makes the codec's scale 1, so that the ties
# lie exactly between two levels.
_largest_and_ties = st.sampled_from(_TIES).flatmap(
    lambda pair: st.lists(st.sampled_from(pair[1].tolist()), min_size=1, max_size=6).map(
        lambda ties: [pair[0], *ties]
    )
)


@st.composite
def rows(draw: st.DrawFn, block: Block, most: int = LONGEST) -> Tensor:
    """Draw a row (S,) fp32 of at most ``most`` elements; ``draw`` is Hypothesis's function that draws from a strategy.

    A few numbers (ties, equal and alternating numbers, denormals, zeros, extremes) are drawn, and repeated until the
    row is long enough.  Most rows are about as long as one or two blocks of ``block`` elements, the codec's block size.
    In some rows, neighbouring blocks are multiplied by different scales.  In some rows, one element is replaced with
    another number, NaN or infinity.
    """
    few = draw(st.one_of(st.lists(_numbers, min_size=1, max_size=24), _largest_and_ties))
    size = 16 if block == "shard" else block
    around = (len(few), 8, size - 1, size, size + 1, 2 * size + 7)
    lengths = sorted({min(n, most) for n in around if n > 0})
    numel = draw(st.one_of(st.just(min(len(few), most)), st.sampled_from(lengths)))
    x = torch.tensor(few, dtype=torch.float32).repeat(-(-numel // len(few)))[:numel].contiguous()
    power = draw(st.one_of(st.just(0), st.integers(-140, 120)))
    x = torch.ldexp(x.double(), torch.tensor(power)).clamp(-_LARGEST, _LARGEST).float()
    if block != "shard" and numel > block and draw(st.integers(0, 1)):
        powers = draw(st.lists(st.integers(-6, 6), min_size=2, max_size=3))
        scales = torch.tensor(powers).double().exp2()[torch.arange(numel) // block % len(powers)]
        x = (x.double() * scales).clamp(-_LARGEST, _LARGEST).float()
    if draw(st.integers(0, 3)) == 1:
        x[draw(st.integers(0, numel - 1))] = draw(_numbers)  # breaks the repetition
    if draw(st.integers(0, 5)) == 1:
        x[draw(st.integers(0, numel - 1))] = draw(st.sampled_from(_BROKEN))
    return x


def cases(
    block: Block, kinds: tuple[Dtype, ...] = get_args(Dtype), most: int = LONGEST
) -> st.SearchStrategy[Case]:
    """Return a Hypothesis strategy that draws cases: a row to encode, with the other inputs of a check.

    Args:
        block: The codec's block size.
        kinds: Element types that the codec supports, from which the types of rows and of decoded elements are drawn.
        most: Number of elements of the longest row.
    """
    types = st.sampled_from(kinds)
    x = st.builds(lambda row, kind: row.to(DTYPES[kind]), rows(block, most), types)
    return st.builds(Case, x=x, out=types, power=st.integers(-30, 30), noise=noises)


class Outcome(NamedTuple):
    """The result of trying one claim (a law or a duty of a codec) on many rows."""

    cases: int  # number of rows that the claim was tried on
    violation: Violation | None  # on the smallest row found that breaks the claim; None if the claim holds


def long_row(block: Block, numel: int) -> Tensor:
    """Return a row (S,) fp32 of ``numel`` normally distributed numbers that are multiplied by a scale for each block.

    The scales of successive blocks are the powers of two from 1/8 to 8, and then again from 1/8.  If ``block`` is
    ``"shard"`` (the codec has one block for the whole row), the scale changes after every 64 elements.
    """
    size = 64 if block == "shard" else min(block, numel)
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    return x * (torch.arange(numel) // size % 7 - 3.0).exp2()


def fixed_cases(subject: Subject, claim: Claim, elements: int = ELEMENTS) -> list[Case]:
    """Return the cases on which a claim (a law or a duty of a codec) is tried before random cases are drawn.

    - There are simple rows, and a row whose blocks have three different scales.
    - There are rows of ties for several number formats.  A tie is the middle between two neighbouring values that the
      format can represent.
    - There may also be rows of the codec's own ties and of the floats next to these ties
      (:func:`~harness.laws.rounding_edges.edge_rows`).  They are added for a built-in codec with blocks, and for a
      user's codec that must equal such a codec bit for bit, if the claim is ``BITS`` or if the subject is the reference
      implementation.
    - If ``elements`` is above :data:`LONGEST`, rows of ``elements`` elements come last.
    """
    ties = [torch.stack([torch.full_like(tie, top), tie], dim=1).flatten() for top, tie in _TIES]
    size = 16 if subject.promises.block == "shard" else min(subject.promises.block, LONGEST // 3)
    blocks = torch.arange(2 * size + 7) // size
    repeated = ties[2].repeat(-(-len(blocks) // len(ties[2])))[: len(blocks)]
    scales = torch.tensor([1.0, 8.0, 0.125])[blocks.clamp(max=2)]
    x = [*map(torch.tensor, _SIMPLE), *ties, repeated * scales]
    codec, noise = subject.codec, Noise((1, 2, 3, 4))
    first: Dtype = "fp32" if "fp32" in subject.kinds else subject.kinds[0]
    kinds = subject.kinds if claim is Duty.BITS else (first,)
    rows = [(first, row[: min(LONGEST, elements)]) for row in x]
    if isinstance(codec, Blocked) and (claim is Duty.BITS or subject.specification):
        edges = [(kind, row) for kind in kinds for row in edge_rows(codec, kind, noise)]
        rows += [(kind, row) for kind, row in edges if row.numel() <= elements]
    if elements > LONGEST:
        rows += [(kind, long_row(subject.promises.block, elements)) for kind in kinds]
    return [Case(x=row.to(DTYPES[kind]), out=kind, power=1, noise=noise) for kind, row in rows]


def falsify(subject: Subject, claim: Claim, *, examples: int, seed: int, elements: int = ELEMENTS) -> Outcome:
    """Try a claim on :func:`fixed_cases` and then on random rows, until a row breaks the claim.

    A claim is a law or a duty of a codec.  If a row breaks it, the result has the violation on the smallest such row
    that was found (:func:`smallest`).

    Args:
        subject: The implementation to check.
        claim: The law or duty to check.
        examples: Number of random rows.  ``UNBIASED`` encodes each row thousands of times.  It is therefore tried on a
            tenth as many random rows, and on no fixed cases.
        seed: Decides which rows are drawn.
        elements: Number of elements of the longest row.
    """
    costly, tried, broken = claim is Law.UNBIASED, 0, list[Case]()

    def breaks(case: Case) -> bool:
        nonlocal tried
        tried += 1
        violated = violation_of(subject, claim, case) is not None
        broken.extend([case] * violated)
        return violated

    if costly or not any(map(breaks, fixed_cases(subject, claim, elements))):
        settings = search_settings(examples, costly=costly)
        rows = cases(subject.promises.block, subject.kinds, min(elements, LONGEST))
        with contextlib.suppress(NoSuchExample, Flaky):
            hypothesis.find(rows, breaks, settings=settings, random=Random(seed))
    return Outcome(tried, smallest(subject, claim, broken[-1]) if broken else None)


def violation_of(subject: Subject, claim: Claim, case: Case) -> Violation | None:
    """Try a claim (a law or a duty of a codec) on one row.

    Returns:
        A violation if the subject gives wrong numbers or raises an exception; None if the claim holds.
    """
    try:
        attempt(subject, claim, case)
    except Violation as violation:
        return violation
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        line = place(error)
        return Violation(f"raised {raised(error)}{line and f', at {line}'}", case.x)
    return None


def smallest(subject: Subject, claim: Claim, case: Case) -> Violation:
    """Make the row of ``case`` as small as possible, and return the violation on the smallest row found.

    The row of ``case`` breaks the claim.  As in delta debugging (Zeller and Hildebrandt 2002), ever smaller ranges of
    elements are removed as long as the remaining row still breaks the claim, in at most about :data:`MOST_TRIED`
    attempts.  The random bits of a stochastic codec depend on the position of an element in the row.  When elements at
    the beginning of the row are removed, positions are still counted from the old beginning.  The remaining elements
    thus keep their random bits.

    If the row of ``case`` no longer breaks the claim when it is tried again, the returned violation says that the codec
    is not deterministic.
    """
    last, tried = violation_of(subject, claim, case), 0
    grain = OCTET if subject.promises.stochastic else 1
    size = case.x.numel() // 2 // grain * grain
    while last is not None and size and tried < MOST_TRIED:
        for start in range(0, case.x.numel(), size):
            tried += 1
            moved = 0 if start else size // OCTET * OCTET
            noise = replace(case.noise, start=case.noise.start + moved)
            smaller = replace(case, x=torch.cat([case.x[:start], case.x[start + size :]]), noise=noise)
            if smaller.x.numel() and (violation := violation_of(subject, claim, smaller)):
                case, last = smaller, violation
                break
        else:
            size = size // 2 // grain * grain
    return last or Violation(
        f"{title(claim)} was broken once, but held when the same row was tried again: the codec is not deterministic",
        case.x,
    )
