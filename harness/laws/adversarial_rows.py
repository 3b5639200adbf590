"""Hypothesis strategies for adversarial rows, and the search for the smallest row that violates a law."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from random import Random
from typing import Final, NamedTuple, get_args

import hypothesis
import torch
from hypothesis import Phase, Verbosity
from hypothesis import strategies as st
from hypothesis.errors import Flaky, NoSuchExample
from torch import Tensor

from harness.laws import ELEMENTS
from harness.laws.laws import Case, Claim, Duty, Subject, Violation, attempt, place, title
from harness.laws.rounding_edges import edge_rows, levels
from impl.codecs.codec import LARGEST, SMALLEST_NORMAL, Block, Blocked, Dtype, FloatCodec, Law
from impl.codecs.reference import DTYPES
from impl.codecs.rounding_noise import OCTET, Noise
from impl.errors import raised

LONGEST: Final = 5000  # elements of a row that is drawn
FEWER: Final = 10  # divides the examples of UNBIASED, which encodes thousands of rows for each
_LARGEST: Final = LARGEST["fp32"]
_EDGES: Final = [
    0.0, 1.0, -1.0, -0.0, 0.5, 2.0, 1.5, 2.5, 1e-20, SMALLEST_NORMAL, -SMALLEST_NORMAL,
    2.0**-149, -(2.0**-149), 65504.0, 1e30, _LARGEST, -_LARGEST,
]  # fmt: skip
_SIMPLE: Final = [[0.0], [1.0], [-1.0], [1.0, 0.5], [1.0, -0.5], [1.0, -1.0]]
MOST_TRIED: Final = 400  # parts of a row, while it is made smaller
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


# Of integers with and without an offset, by their largest code; of floats, by their largest element.
_FLOATS: Final = (FloatCodec("e2m1", 32, "e8m0"), FloatCodec("e4m3", 32), FloatCodec("e5m2", 32))
_TIES: Final = [
    *((float(top), torch.arange(-top, top) + 0.5) for top in (1, 3, 7, 15, 31, 63, 127, 255)),
    *((codec.largest, levels(codec).float().unfold(0, 2, 1).mean(1)) for codec in _FLOATS),
]
# A largest value, so that steps are 1, and ties.
_largest_and_ties = st.sampled_from(_TIES).flatmap(
    lambda pair: st.lists(st.sampled_from(pair[1].tolist()), min_size=1, max_size=6).map(
        lambda ties: [pair[0], *ties]
    )
)


@st.composite
def rows(draw: st.DrawFn, block: Block, most: int = LONGEST) -> Tensor:
    """(S,) fp32: ties, equal, alternating, one spike, denormals, zeros, extremes; at times NaN, infinities.

    A few numbers repeated to a length around the block's, ``most`` at most; blocks may have their own scales.
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
        x[draw(st.integers(0, numel - 1))] = draw(_numbers)  # not a repetition of the others
    if draw(st.integers(0, 5)) == 1:
        x[draw(st.integers(0, numel - 1))] = draw(st.sampled_from(_BROKEN))
    return x


def cases(
    block: Block, kinds: tuple[Dtype, ...] = get_args(Dtype), most: int = LONGEST
) -> st.SearchStrategy[Case]:
    """Cases for codecs with such blocks and types, of at most ``most`` elements."""
    types = st.sampled_from(kinds)
    x = st.builds(lambda row, kind: row.to(DTYPES[kind]), rows(block, most), types)
    return st.builds(Case, x=x, out=types, power=st.integers(-30, 30), noise=noises)


class Outcome(NamedTuple):
    """The result of trying a claim."""

    cases: int  # rows that it was tried on
    violation: Violation | None  # by the smallest row that breaks it; None if it holds


def long_row(block: Block, numel: int) -> Tensor:
    """(S,) fp32: normal numbers, blocks on seven scales; the last block is short if it can be."""
    size = 64 if block == "shard" else min(block, numel)
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    return x * (torch.arange(numel) // size % 7 - 3.0).exp2()


def fixed_cases(subject: Subject, claim: Claim, elements: int = ELEMENTS) -> list[Case]:
    """What is tried always and first: simple rows, all ties of each format, blocks on three scales; the edges
    between our codecs' levels, for bits and on the specification; last a row of ``elements``.
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
    """Try a claim on :func:`fixed_cases`, then on ``examples`` drawn rows, of at most ``elements``;
    ``UNBIASED``, which encodes thousands of rows each time, on a tenth as many, without shrinking.
    """
    costly, tried, broken = claim is Law.UNBIASED, 0, list[Case]()

    def breaks(case: Case) -> bool:
        nonlocal tried
        tried += 1
        violated = violation_of(subject, claim, case) is not None
        broken.extend([case] * violated)
        return violated

    if costly or not any(map(breaks, fixed_cases(subject, claim, elements))):
        settings = hypothesis.settings(
            max_examples=max(2, examples // FEWER) if costly else examples,
            database=None,
            deadline=None,
            derandomize=False,
            phases=[Phase.generate] if costly else [Phase.generate, Phase.shrink],
            verbosity=Verbosity.quiet,
        )
        rows = cases(subject.promises.block, subject.kinds, min(elements, LONGEST))
        with contextlib.suppress(NoSuchExample, Flaky):
            hypothesis.find(rows, breaks, settings=settings, random=Random(seed))
    return Outcome(tried, smallest(subject, claim, broken[-1]) if broken else None)


def violation_of(subject: Subject, claim: Claim, case: Case) -> Violation | None:
    """The violation of a claim on one row, by wrong numbers or an exception; None if it holds."""
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
    """The violation by a part of a row that needs all its elements, by delta debugging (Zeller and
    Hildebrandt 2002): ever smaller blocks of elements are left out, at most ``MOST_TRIED`` times.
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
    return last or Violation(f"{title(claim)} broke once, and not when the same row was tried again", case.x)
