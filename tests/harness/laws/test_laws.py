"""The laws hold for every codec that declares them, and the checks find codecs that break them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from harness.laws.adversarial_rows import cases, falsify, fixed_cases, violation_of
from harness.laws.laws import Case, Claim, Duty, Subject, Violation, attempt
from harness.laws.rounding_edges import levels
from harness.laws.subject import subject_of, user_subject
from impl.codecs import reference
from impl.codecs.codec import FORMATS, Codec, IntCodec, Law, Raw, parse, user_codec
from impl.codecs.rounding_noise import Noise
from tests.support.params import nightly
from tests.support.strategies import codecs, stochastic_codecs

BACKENDS = [
    "reference",
    pytest.param("cpu", marks=pytest.mark.needs("c++")),
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.needs("CuPy")]),
]
HOLD = [claim for claim in (*Duty, *Law) if claim is not Law.UNBIASED]
ROW = torch.tensor([-1e-45, 0.0, 1e-45])


def trials(codecs: st.SearchStrategy[Codec]) -> st.SearchStrategy[tuple[Codec, Case]]:
    """Return a strategy for codecs, each with a row that is hard for its blocks."""
    return codecs.flatmap(lambda codec: st.tuples(st.just(codec), cases(getattr(codec, "block", 1))))


def check(backend: str, claim: Claim, codec: Codec, case: Case) -> None:
    subject = subject_of(codec, backend)
    if claim in subject.claims:
        attempt(subject, claim, case)


@pytest.mark.parametrize("claim", HOLD)
@pytest.mark.parametrize("backend", BACKENDS)
@given(trial=trials(st.one_of(codecs, codecs, stochastic_codecs)))
@example(trial=(parse("int4:8"), Case(ROW)))
@example(trial=(parse("int8:shard"), Case(torch.tensor([3.4028234e38, -3.4028234e38, 1.0]))))
@example(trial=(parse("int3:shard:asym"), Case(torch.tensor([3.4028234e38, -3.4028234e38, 1.0]))))
def test_every_claim_is_kept(backend: str, claim: Claim, trial: tuple[Codec, Case]) -> None:
    """Codecs keep all laws that they declare on adversarial rows, in every type and on every backend."""
    check(backend, claim, *trial)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=max(10, settings.default.max_examples // 2))
@given(trial=trials(stochastic_codecs))
@example(trial=(parse("int4:32:asym:stochastic"), Case(1 + torch.arange(21.0) * 2.0**-23)))  # range: 20 ulps
def test_random_rounding_is_unbiased(backend: str, trial: tuple[Codec, Case]) -> None:
    """The mean over random bits is the value itself; the check blames an unbiased codec once in 1e9 rows."""
    check(backend, Law.UNBIASED, *trial)


@pytest.mark.parametrize(
    ("text", "law"),
    [
        ("int4:4:asym", Law.SIGN),
        ("int3:4:asym", Law.IDEMPOTENT),
        ("int4:4:clip", Law.SIGN),
        ("int4:4:clip", Law.IDEMPOTENT),
        ("int4:4:stochastic", Law.SIGN),
        ("int4:4:hadamard4", Law.IDEMPOTENT),
        ("int4:4", Law.UNBIASED),
    ],
)
def test_what_is_not_declared_does_not_hold(text: str, law: Law) -> None:
    """A law that a codec does not declare is one that the codec breaks."""
    assert law not in parse(text).laws
    subject, random = subject_of(parse(text), "reference"), torch.Generator().manual_seed(0)
    rows = (Case(torch.randn(4, generator=random)) for _ in range(300))
    assert any(violation_of(subject, law, case) for case in rows)


class Toy:
    """A codec of eight bits in blocks of 4, with fp32 scales behind the codes; it keeps all laws of deterministic
    codecs.
    """

    laws = ("bound", "zero", "idempotent", "sign", "power_of_two", "nonfinite")
    block = 4
    stochastic = False

    def frame_bytes(self, numel: int) -> int:
        return numel + 4 * -(-numel // 4)

    def error_bound(self, low: float, high: float, out: str) -> float:
        top = max(-low, high)
        return max(top / 127, 2.0**-126) * (1.001 if self.stochastic else 0.501) + top * 2.0**-23

    def scales(self, blocks: Tensor) -> Tensor:
        return (blocks.abs().amax(dim=1, keepdim=True) / 127).clamp(min=2.0**-126)

    def rounded(self, quotients: Tensor, noise: Noise | None) -> Tensor:
        return quotients.round()

    def encode(self, x: Tensor, frame: Tensor, noise: Noise | None = None) -> None:
        numel = len(x)
        blocks = torch.cat([x, x[-1:].expand(-numel % 4)]).view(-1, 4)
        scales = self.scales(blocks)
        codes = self.rounded(blocks / scales, noise).clamp(-127, 127).nan_to_num(0.0)
        scales = scales.masked_fill(~blocks.isfinite().all(dim=1, keepdim=True), torch.nan)
        frame[:numel] = codes.to(torch.int8).view(torch.uint8).flatten()[:numel]
        frame[numel : numel + 4 * len(blocks)] = scales.flatten().view(torch.uint8)

    def decode(self, frame: Tensor, out: Tensor) -> None:
        scales = frame[len(out) : len(out) + 4 * -(-len(out) // 4)].clone().view(torch.float32)
        values = frame[: len(out)].view(torch.int8).float() * scales.repeat_interleave(4)[: len(out)]
        out.copy_(values.clamp(-3.4028234663852886e38, 3.4028234663852886e38))


class Random(Toy):
    """A :class:`Toy` that rounds at random."""

    laws = ("bound", "zero", "unbiased", "nonfinite", "power_of_two")
    stochastic = True

    def rounded(self, quotients: Tensor, noise: Noise | None) -> Tensor:
        assert noise is not None
        generator = torch.Generator().manual_seed(noise.philox[0] ^ noise.start)
        return (quotients + torch.rand(quotients.shape, generator=generator) - 0.5).round()


class Remembering(Toy):
    """A codec that decodes the row that it encoded last, whatever the frame."""

    def encode(self, x: Tensor, frame: Tensor, noise: Noise | None = None) -> None:
        self.last = x.clone()
        frame.zero_()

    def decode(self, frame: Tensor, out: Tensor) -> None:
        out.copy_(self.last)


def changed(kind: type[Toy], **methods: Any) -> Any:
    return type("Changed", (kind,), methods)


toy = partial(changed, Toy)


def decoding(change: Callable[[Tensor, Tensor], object], **methods: Any) -> Any:
    """Return a :class:`Toy` that decodes correctly, and then changes its frame or the decoded elements."""
    return toy(decode=lambda self, frame, out: (Toy.decode(self, frame, out), change(frame, out)), **methods)


def bounded(bound: float) -> Any:
    """Return a codec that decodes everything to zeros, and declares ``bound`` as its error bound."""
    return decoding(lambda _, out: out.zero_(), error_bound=lambda *_: bound)


GHOSTLY = decoding(lambda _, out: out.add_(2.0**-140))  # adds a little to everything
LATE = decoding(lambda _, out: out[6000:].zero_())  # as a kernel whose grid or counter ends there


def toy_subject(implementation: Any) -> Subject:
    return user_subject(user_codec(implementation, "toy"))


def search(subject: Subject, claim: Claim, **options: int) -> Violation | None:
    """Return the violation on the smallest row that breaks a claim, or None."""
    return falsify(subject, claim, **options).violation


def broken(kind: Any, claim: Claim) -> Violation | None:
    return search(toy_subject(kind), claim, examples=300, seed=1)


class Summing(Toy):
    """A codec that also offers decode_sum and decode_sum_encode."""

    def decode_sum(self, frames: Tensor, out: Tensor) -> None:
        terms = torch.empty(len(frames), len(out))
        for frame, term in zip(frames, terms, strict=True):
            self.decode(frame, term)
        out.copy_(reduce(torch.add, terms))

    def decode_sum_encode(self, frames: Tensor, frame: Tensor, numel: int) -> None:
        total = torch.empty(numel)
        self.decode_sum(frames, total)
        self.encode(total, frame)


@pytest.mark.parametrize(("kind", "sums"), [(Toy, []), (Random, []), (Summing, [Duty.SUM, Duty.FUSED])])
def test_honest_codecs_of_others_pass(kind: type[Toy], sums: list[Duty]) -> None:
    """A user's codec that keeps its laws passes, and sums are checked if the codec offers them."""
    subject = toy_subject(kind)
    assert {*subject.claims} == {Duty.FRAME, Duty.LOCAL, *sums, *(Law[law.upper()] for law in kind.laws)}
    for claim in subject.claims:
        assert search(subject, claim, examples=10, seed=1) is None


@pytest.mark.parametrize(
    ("kind", "claim", "most", "message"),
    [
        (  # leaves the last byte of its frame as it was
            toy(frame_bytes=lambda self, numel: Toy.frame_bytes(self, numel) + 4),
            Duty.FRAME, 1, "byte 5 of 9 depends on what its buffer held before: 00 or ff",
        ),
        (Remembering, Duty.FRAME, 1, "depends on more than its frame"),
        (  # changes what it is given
            toy(encode=lambda self, x, frame, _=None: (Toy.encode(self, x, frame), x.add_(1.0))),
            Duty.FRAME, 1, "encoding changed element 0",
        ),
        (decoding(lambda frame, _: frame.bitwise_not_()), Duty.FRAME, 1, "decoding changed byte 0 of the 5 bytes"),
        (toy(encode=lambda *_: sys.exit(0)), Duty.FRAME, 1, "raised SystemExit: 0, at "),
        (  # takes its scale from the maximum, not from the magnitude
            toy(scales=lambda _, blocks: (blocks.amax(dim=1, keepdim=True) / 127).clamp(min=2.0**-126)),
            Law.BOUND, 1, "more than the bound",
        ),
        (bounded(float("nan")), Law.BOUND, 1, "error_bound(0, 0, 'fp32') is nan"),
        (bounded(float("inf")), Law.BOUND, 1, "error_bound(0, 0, 'fp32') is inf"),
        (GHOSTLY, Law.ZERO, 1, "in a block of zeros"),
        (decoding(lambda _, out: out.mul_(1 - 2.0**-12)), Law.IDEMPOTENT, 1, "in a second round trip"),
        (  # rounds halves up
            toy(rounded=lambda _, quotients, __: (quotients + 0.5).floor()),
            Law.SIGN, 2, "its negative to",
        ),
        (  # has a smallest scale that data can reach
            toy(scales=lambda self, blocks: Toy.scales(self, blocks).clamp(min=1e-8)),
            Law.POWER_OF_TWO, 1, "times the element decodes to",
        ),
        (
            decoding(lambda _, out: out.nan_to_num_(0.0)),
            Law.NONFINITE, 1, "in a block that holds a NaN or an infinity",
        ),
    ],
)  # fmt: skip
def test_codecs_that_break_a_law_are_found(kind: type[Toy], claim: Claim, most: int, message: str) -> None:
    """For each claim there is a codec that breaks it, and a row of one or two elements that shows it."""
    violation = broken(kind, claim)
    assert violation is not None
    assert message in str(violation)
    assert violation.x.numel() <= most


def test_a_bound_that_allows_everything_does_not_hide_a_bias() -> None:
    """UNBIASED refuses an error bound of NaN, within which any bias would be allowed."""
    lax = toy_subject(changed(Random, error_bound=lambda *_: float("nan")))
    assert "error_bound(" in str(violation_of(lax, Law.UNBIASED, Case(ROW)))


@pytest.mark.parametrize(("shift", "refused"), [(0.02, False), (0.1, True)])
def test_the_power_of_the_means_is_as_stated(shift: float, refused: bool) -> None:
    """A bias of a tenth of a step is found, and a bias of a fiftieth is not."""
    shifted = changed(Random, rounded=lambda self, x, noise: Random.rounded(self, x + shift, noise))
    case = Case(torch.tensor([127.0, 0.0, 0.5, -3.25]))
    assert (violation_of(toy_subject(shifted), Law.UNBIASED, case) is not None) == refused


def claiming(text: str, change: Callable[[Tensor, Tensor], object]) -> Subject:
    """Return a subject that encodes as the reference does and then changes the frames."""
    honest = subject_of(parse(text), "reference")

    def encode(x: Tensor, frames: Tensor, noise: Noise) -> None:
        honest.encode(x, frames, noise)
        change(x, frames)

    return replace(honest, encode=encode, specification=False)


@pytest.mark.parametrize("text", ["int8:16", "mxfp4", "int4:32:hadamard8:stochastic", *FORMATS])
def test_other_bits_than_the_references_are_found(text: str) -> None:
    """A frame that differs from the reference's in one bit of a code or scale is found."""
    assert Duty.BITS not in subject_of(parse(text), "reference").claims  # which is not held to itself
    changes: list[Callable[[Tensor, Tensor], object]] = [
        lambda *_: None,
        lambda _, frames: frames[..., 0].bitwise_xor_(1),
        lambda _, frames: frames[..., -16].bitwise_xor_(1),
    ]
    honest, *wrong = (
        search(claiming(text, change), Duty.BITS, examples=10, seed=0, elements=300) for change in changes
    )
    assert honest is None
    assert all("of the frame is" in str(violation) for violation in wrong)


def test_what_a_codec_raises_is_a_violation() -> None:
    """An error of a user's code is reported with the smallest row, not raised."""

    class Fragile(Toy):
        def encode(self, x: Tensor, frame: Tensor, noise: Noise | None = None) -> None:
            if len(x) > 3:
                raise IndexError("no room for a fourth")
            super().encode(x, frame)

    violation = broken(Fragile, Law.ZERO)
    assert violation is not None
    assert re.fullmatch(
        r"raised IndexError: no room for a fourth, at tests/harness/laws/test_laws\.py line \d+, in encode: "
        r'raise IndexError\("no room for a fourth"\)',
        str(violation),
    )
    assert violation.x.numel() == 4


def test_what_a_library_raises_is_shown_where_it_was_called() -> None:
    """The line is the codec's own, not torch's, and not one of ours that it called."""
    misshapen = toy(decode=lambda _, __, out: torch.nn.functional.linear(out, torch.zeros(3, 2, 1)))
    misled = toy(encode=lambda _, x, frame, __=None: reference.encode(parse("int8:4"), x, frame[:0]))
    for kind, line in ((misshapen, "misshapen = toy(decode="), (misled, "misled = toy(encode=")):
        assert f", in <lambda>: {line}" in str(broken(kind, Law.ZERO))


def test_what_does_not_repeat_is_said_to() -> None:
    """A codec that breaks a law only once is reported as not deterministic."""
    times = iter([True] + [False] * 10**6)
    moody = decoding(lambda _, out: out.add_(float(next(times))))
    assert "zero was broken once, but held when the same row was tried again" in str(broken(moody, Law.ZERO))


def nosy(frame: Tensor, out: Tensor) -> None:
    """Decode to the scale of the block before, where that is none."""
    scales = frame[len(out) : len(out) + 4 * -(-len(out) // 4)].clone().view(torch.float32)
    before = torch.cat([scales[:1], scales[:-1]]).repeat_interleave(4)[: len(out)]
    out.copy_(torch.where(before.isfinite(), out, before))


def test_what_a_short_row_alone_does_not_show_is_found() -> None:
    """Kernels that look beside their block, or add up otherwise, are found by their claim alone."""
    backwards = changed(Summing, decode_sum=lambda _, frames, out: Summing().decode_sum(frames.flip(0), out))
    forgetful = changed(  # the last of an odd number of frames, where it sums and encodes at once
        Summing,
        decode_sum_encode=lambda _, frames, frame, numel: Summing().decode_sum_encode(
            frames[: max(1, len(frames) // 2 * 2)], frame, numel
        ),
    )
    for kind, claim, message in (
        (decoding(nosy), Duty.LOCAL, "another block, were changed"),
        (backwards, Duty.SUM, "of the sum of 5 frames is"),
        (forgetful, Duty.FUSED, "of the frame of the sum of 5 frames is"),
    ):
        assert message in str(broken(kind, claim))
        assert search(toy_subject(kind), Duty.FRAME, examples=10, seed=1) is None


@pytest.mark.long
def test_the_shortest_beginning_of_a_long_row_is_shown() -> None:
    """A fault from element 6000 on is shown on a row of 6001 elements, and not looked for in shorter rows."""
    violation = broken(LATE, Law.BOUND)
    assert violation is not None
    assert 6001 <= violation.x.numel() < 6100  # one of those after 6000 may be 0
    assert search(toy_subject(LATE), Law.BOUND, examples=5, seed=0, elements=6000) is None


def test_cases_are_counted() -> None:
    """The count has all fixed rows, drawn rows and the long row; after a violation, the rows up to it."""
    subject = toy_subject(Toy)
    fixed = len(fixed_cases(subject, Law.ZERO))
    outcome = falsify(subject, Law.ZERO, examples=30, seed=0)
    assert outcome.violation is None
    assert fixed < outcome.cases <= fixed + 30
    assert falsify(toy_subject(GHOSTLY), Law.ZERO, examples=30, seed=0).cases == 1


def half_away(x: Tensor, frames: Tensor) -> None:
    """Round ties of int4:64 away from zero."""
    x = x.float()
    away = torch.nextafter(x, x.sign() * torch.inf)
    for part, moved in zip(x.split(64, dim=-1), away.split(64, dim=-1), strict=True):
        moved.copy_(torch.where(part.abs() == part.abs().amax(-1, keepdim=True), part, moved))
    reference.encode(parse("int4:64"), away, frames)


def last_block(x: Tensor, frames: Tensor) -> None:
    """Give a short last block of int4:64 the scale of the one before it."""
    blocks = -(-x.shape[-1] // 64)
    if x.shape[-1] % 64 and blocks > 1:
        at = parse("int4:64").scales_at(x.shape[-1]) + 4 * (blocks - 1)
        frames[..., at : at + 4] = frames[..., at - 4 : at].clone()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("change", "most"), [(half_away, 2), (last_block, 135)])
def test_ties_and_short_last_blocks_are_tried_with_every_seed(change: Any, most: int, seed: int) -> None:
    """A kernel that rounds ties otherwise, or mistakes a short last block, is found whatever the seed."""
    violation = search(claiming("int4:64", change), Duty.BITS, examples=1, seed=seed)
    assert violation is not None
    assert violation.x.numel() <= most


def reciprocal(text: str, *, of_scale: bool) -> Subject:
    """The codec as a kernel that multiplies by 1 / scale, or by top / largest element, and never divides."""
    codec = parse(text)
    assert isinstance(codec, IntCodec)
    honest = subject_of(codec, "reference")
    top = (1 << (codec.bits - (not codec.asymmetric))) - 1

    def encode(x: Tensor, frames: Tensor, noise: Noise) -> None:
        wide = x.float()
        low, high = wide.min(), wide.max()
        if not codec.asymmetric:
            low, high = torch.zeros(()), wide.abs().max()
        divisor = torch.tensor(float(top))
        scale = (high / divisor - low / divisor).clamp(min=2.0**-126)
        factor = 1 / scale if of_scale else divisor / (high - low)
        quotients = (wide - low) * factor
        if codec.stochastic:
            bits = reference.random_bits(noise, x.shape[:-1], x.shape[-1], x.device).float()
            quotients = quotients + (bits * 2.0**-16 - (0.5 - 2.0**-17))
        coded = low + quotients.round().clamp(-top, top) * scale  # which the reference gives the same codes
        kept = (wide == high) | (wide == (low if codec.asymmetric else -high)) | ~coded.isfinite()
        honest.encode(torch.where(kept, wide, coded), frames, noise)

    return replace(honest, encode=encode, specification=False, kinds=("fp32",))


@pytest.mark.parametrize("of_scale", [True, False])
@pytest.mark.parametrize("option", ["", ":asym", ":stochastic", ":asym:stochastic"])
@pytest.mark.parametrize("bits", [2, 4, 8, *nightly(3, 5, 6, 7)])
def test_a_product_instead_of_a_quotient_is_found(bits: int, option: str, of_scale: bool) -> None:
    """For every width and scheme, in the first rows that are tried, and shown in a few elements; with random
    bits, which belong to places, in an octet, of which wider codes have thousands to try.
    """
    subject, random = reciprocal(f"int{bits}:shard{option}", of_scale=of_scale), "stochastic" in option
    violations = (violation_of(subject, Duty.BITS, case) for case in fixed_cases(subject, Duty.BITS))
    assert any("of the frame is" in str(violation) for violation in violations)
    if not random or (bits, option) in ((2, ":asym:stochastic"), (4, ":stochastic")):
        violation = search(subject, Duty.BITS, examples=1, seed=0)
        assert violation is not None
        assert violation.x.numel() <= (8 if random else 3)


@pytest.mark.parametrize(
    "text",
    [*(f"int{bits}:shard{option}" for bits in range(2, 9) for option in ("", ":asym")), "fp8e4m3:shard",
     "fp8e5m2:shard", "mxfp8", "mxfp8e5m2", "mxfp4"],
)  # fmt: skip
def test_levels_are_what_codes_decode_to(text: str) -> None:
    """At scale 1 all numbers in range decode to levels, and each level to itself."""
    codec = parse(text)
    assert not isinstance(codec, Raw)
    user_codec = levels(codec).float()
    assert user_codec.tolist() == sorted(set(user_codec.tolist()))
    low = 0.0 if codec.asymmetric else -codec.largest
    dense = torch.cat([torch.linspace(low, codec.largest, 3000), user_codec])
    dense = torch.cat([dense, dense.new_full((-len(dense) % 30,), low)]).view(-1, 30)
    x = torch.cat([torch.tensor([[low, codec.largest]]).expand(len(dense), -1), dense], 1)  # of scale 1
    frames = torch.empty((len(x), codec.frame_bytes(32)), dtype=torch.uint8)
    reference.encode(codec, x, frames)
    reference.decode(codec, frames, x)
    assert {*x.flatten().tolist()} == {*user_codec.tolist()}
