"""Published formats keep their laws, have their published sizes, and train."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.laws.adversarial_rows import falsify
from harness.laws.subject import subject_of
from impl import ops
from impl.codecs.codec import FORMATS, parse
from impl.codecs.published_formats import _float_table, _Microscaled
from impl.policy.presets import preset
from impl.policy.topology import Topology
from tests.impl.codecs.test_reference import through
from tests.support.ranks import on_threads
from tests.support.strategies import ROOMY, blocks_of_values
from tests.support.training import mean_losses, model, single, train

BITS = {
    "nvfp4": 4 + 8 / 16, "mxfp6e2m3": 6.25, "mxfp6e3m2": 6.25, "nf4": 4.5,
    "spike2": 2 + 80 / 128, "spike3": 3 + 80 / 128, "sign1": 1.25, "bf16sr": 16,
}  # fmt: skip


@pytest.mark.parametrize("text", FORMATS)
def test_every_claim_of_a_format_is_kept(text: str) -> None:
    """Adversarial rows of a few blocks break no law that a format promises."""
    subject = subject_of(parse(text), "reference")
    assert subject.claims
    for claim in subject.claims:
        result = falsify(subject, claim, examples=10, seed=3, elements=300)
        assert result.violation is None, str(result.violation)


@pytest.mark.parametrize("text", FORMATS)
def test_bits_are_those_of_codes_and_scales(text: str) -> None:
    """A long row takes its codes and its blocks' scales, and at most 4 bytes and padding in addition."""
    codec = parse(text)
    assert str(codec) == text
    numel = 1 << 16
    assert 0 <= codec.frame_bytes(numel) - numel * BITS[text] / 8 <= 4 + 16


class MX4(_Microscaled):
    bits, table = 4, _float_table(4, 1, 0)


class MX8(_Microscaled):
    """MXFP8 by a table of values; its 8-bit code numbers E4M3's 253 values."""

    bits = 8
    table = tuple(v for v in _float_table(8, 3, -6) if abs(v) <= 448)


@pytest.mark.parametrize(("table", "text"), [(MX4(), "mxfp4"), (MX8(), "mxfp8")], ids=["mxfp4", "mxfp8"])
@given(x=blocks_of_values())
def test_tables_round_as_the_kernels_do(table: _Microscaled, text: str, x: torch.Tensor) -> None:
    """Tables of all values decode, bit for bit, to the values of MXFP4's and MXFP8's kernels."""
    codec = parse(text)
    frames = torch.zeros(codec.frame_bytes(x.numel()), dtype=torch.uint8)
    frame = torch.zeros(table.frame_bytes(x.numel()), dtype=torch.uint8)
    by_kernel, by_table = torch.empty_like(x), torch.empty_like(x)
    ops.encode(codec, x, frames)
    ops.decode(codec, frames, by_kernel)
    table.encode(x, frame)
    table.decode(frame, by_table)
    assert torch.equal(by_table, by_kernel)


@given(st.integers(0, 2**32 - 1))
def test_formats_of_normal_values_err_as_published(seed: int) -> None:
    """For normally distributed values NF4's error is below MXFP4's, NVFP4's below both, and 6 bits have a tenth."""
    x = torch.randn(1 << 13, generator=torch.Generator().manual_seed(seed))
    errors = {}
    for text in ("nvfp4", "nf4", "mxfp4", "mxfp6e2m3"):
        errors[text] = float((through(parse(text), x) - x).square().sum() / x.square().sum())
    assert 10 * errors["mxfp6e2m3"] < errors["nvfp4"] < errors["mxfp4"]
    assert errors["nf4"] < errors["mxfp4"]
    assert math.isfinite(errors["nf4"])


@pytest.mark.parametrize("text", ["nvfp4", "spike3"])
def test_a_format_carries_weights_and_gradients(text: str) -> None:
    """Training with a format follows a single process, as with a built-in codec."""
    codec = parse(text)
    policy = preset("zeropp", weights=codec, gradients=(codec, codec), memory=ROOMY)
    results = on_threads(Topology(2, 2), train, model(), policy, 3)
    assert mean_losses(results) == pytest.approx(single(model(), 4, 3), rel=0.2)
