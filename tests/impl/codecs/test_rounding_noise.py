"""Random bits are Philox's and depend on the element, not on the layout."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness.laws.adversarial_rows import noises
from impl.codecs import reference
from impl.codecs.codec import Blocked, FloatCodec, parse
from impl.codecs.rounding_noise import BITS, OCTET, Clock, Key, Noise, Words
from tests.impl.codecs.test_reference import through
from tests.support.philox import bits_of, philox
from tests.support.strategies import blocked_codecs, keys, stochastic_codecs

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "wanted"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (  # digits of pi
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_its_authors_answers(counter: Words, key: tuple[int, int], wanted: Words) -> None:
    """Philox4x32-10 gives the known answers that its authors publish with Random123."""
    assert philox(counter, key) == wanted


@given(noises, st.integers(1, 40), st.integers(1, 3))
@example(Noise((ONES, ONES, ONES, ONES), 2**35 - 8), 24, 1)  # the counter's second word begins
def test_tensors_of_bits_equal_the_oracle(noise: Noise, numel: int, rows: int) -> None:
    """The vectorised bits of every element equal those computed with plain integers."""
    strided = replace(noise, strides=(80,))
    bits = reference.random_bits(strided, torch.Size([rows]), numel, torch.device("cpu"))
    wanted = [[bits_of(noise, noise.start + 80 * row + i) for i in range(numel)] for row in range(rows)]
    assert bits.tolist() == wanted


@given(
    st.one_of(blocked_codecs, stochastic_codecs),
    keys,
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.integers(0, 2**31),
)
def test_bits_do_not_depend_on_the_layout(codec: Blocked, key: Key, parts: list[int], seed: int) -> None:
    """Shards, chunks and rows that are cut on blocks and octets decode like the whole, bit for bit."""
    grain = math.lcm(OCTET, codec.grain)
    codec = codec if codec.block != "shard" else replace(codec, block=grain)
    x = torch.randn(sum(parts) * grain, generator=torch.Generator().manual_seed(seed))
    whole, pieces, start = through(codec, x, key.noise()), [], 0
    for part in x.split([n * grain for n in parts]):
        pieces.append(through(codec, part, key.noise(start)))
        start += part.numel()
    rows = through(codec, x.view(-1, grain), key.noise(0, (grain,)))
    assert torch.equal(torch.cat(pieces), whole)
    assert torch.equal(rows.flatten(), whole)


@pytest.mark.parametrize(
    ("text", "low", "high"),  # extremes of a block of scale 1
    [
        ("int8:shard:stochastic", -127.0, 127.0),
        ("int4:shard:stochastic", -7.0, 7.0),
        ("int2:shard:stochastic", -1.0, 1.0),
        ("int8:shard:asym:stochastic", 0.0, 255.0),
        ("int3:shard:asym:stochastic", 0.0, 7.0),
        ("fp8e4m3:shard:stochastic", -448.0, 448.0),
        ("fp8e5m2:shard:stochastic", -57344.0, 57344.0),
        ("mxfp4:stochastic", -6.0, 6.0),
    ],
)
@settings(max_examples=max(5, settings.default.max_examples // 10))
@given(places=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=6))
@example(places=[1 / 512, 0.5 + 1 / 512, 200.5 / 255, 200 / 255, 0.75, 1 / 3])
@example(places=[2.0**-17, 1e-6, 1 - 2.0**-17, 0.5 + 2.0**-17, 2.0**-24, 0.999])
def test_the_mean_over_all_random_bits_is_the_value(
    text: str, low: float, high: float, places: list[float]
) -> None:
    """The mean of a value rounded with each of the 65536 random bits is the value, within 2^-16 of a step."""
    codec = parse(text)
    x = torch.tensor([low, high, *(low + (high - low) * place for place in places)])
    draws = torch.arange(1 << BITS).view(-1, 1).expand(-1, x.numel())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "random_bits", lambda *_: draws)
        rounded = through(codec, x.expand(1 << BITS, -1), Noise((0, 0, 0, 0), 0, (OCTET,)))
    step = torch.ones(x.shape, dtype=torch.float64)
    if isinstance(codec, FloatCodec):
        exponents = torch.frexp(x.abs()).exponent - 1
        step = 2.0 ** (exponents.clamp(min=codec.smallest_exponent) - codec.mantissa).double()
    off = rounded.double().mean(dim=0) - x.double()
    assert bool((off.abs() <= step * 2.0**-BITS).all())


@given(keys, keys)
def test_other_keys_have_other_bits(first: Key, second: Key) -> None:
    """Different keys give different bits, and equal keys equal bits."""
    assert (first.noise().philox == second.noise().philox) == (first == second)
    for part in ("seed", "step", "micro_batch", "unit", "purpose", "hop", "source"):
        mixed = replace(first, **{part: getattr(second, part)})
        assert (mixed.noise().philox == first.noise().philox) == (mixed == first)


def test_the_clock_keys_what_is_encoded() -> None:
    """Weights get the same bits in all micro-batches of a step; gradients get others for each rank, pass and step."""
    clock = Clock(seed=3)
    weights, gradients = clock.weights("a"), {clock.gradients("a", rank) for rank in (0, 1)}
    clock.micro_batch += 1
    assert clock.weights("a") == weights
    gradients |= {clock.gradients("a", rank) for rank in (0, 1)}
    clock.step, clock.micro_batch = clock.step + 1, 0
    assert clock.weights("a") != weights
    gradients |= {clock.gradients("a", rank) for rank in (0, 1)}
    assert len(gradients) == 6


@pytest.mark.parametrize(("start", "strides"), [(4, ()), (-8, ()), (0, (12,)), (8, (16, -8))])
def test_other_starts_are_refused(start: int, strides: tuple[int, ...]) -> None:
    """Starts and strides that cut an octet are refused, and the error names the number."""
    with pytest.raises(ValueError, match="multiples of 8 elements, got"):
        Noise((0, 0, 0, 0), start, strides)
