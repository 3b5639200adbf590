"""The bound of reduced gradients holds for one codec, and for several codecs in turn."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.measure.gradient_bounds import SAMPLED, FirstGradient, composed, layouts_of, relative_bound
from impl.codecs import reference
from impl.codecs.codec import Codec, parse
from impl.codecs.rounding_noise import Clock
from impl.policy.presets import preset
from impl.policy.shard_layout import ParameterSpec, lay_out
from impl.policy.topology import Topology

CODECS = (
    "fp32", "bf16", "fp16", "int8:64", "int4:64", "int2:64", "int4:64:asym", "fp8e4m3:64", "fp8e5m2:64",
    "mxfp8", "mxfp4", "int4:64:hadamard32", "int4:64:stochastic", "mxfp4:stochastic",
)  # fmt: skip


def through(codec: Codec, x: torch.Tensor) -> torch.Tensor:
    frames = torch.empty((len(x), codec.frame_bytes(x.shape[1])), dtype=torch.uint8)
    noise = Clock().weights("").noise(0, (x.shape[1],)) if codec.stochastic else None
    reference.encode(codec, x, frames, noise=noise)
    decoded = torch.empty_like(x)
    reference.decode(codec, frames, decoded)
    return decoded


@given(
    text=st.sampled_from(CODECS),
    magnitude=st.floats(1e-6, 1e4),
    seed=st.integers(0, 2**32 - 1),
    spiky=st.booleans(),
)
def test_one_codec_keeps_every_element_within_its_relative_bound(
    text: str, magnitude: float, seed: int, spiky: bool
) -> None:
    """No element's error exceeds the relative bound times the block's largest magnitude, whatever that magnitude."""
    codec = parse(text)
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn((1, 64), generator=draw)
    x = (x**5 if spiky else x) * magnitude / float((x**5 if spiky else x).abs().max())
    error = (through(codec, x) - x).abs().max()
    assert float(error) <= relative_bound(codec) * float(x.abs().max()) + 1e-30


@given(
    first=st.sampled_from(CODECS),
    second=st.sampled_from(CODECS),
    seed=st.integers(0, 2**32 - 1),
    nodes=st.integers(1, 3),
)
def test_two_hops_keep_a_mean_within_the_composed_bound(
    first: str, second: str, seed: int, nodes: int
) -> None:
    """A mean that is encoded in two hops errs by at most the composed bound times the mean of largest magnitudes."""
    draw = torch.Generator().manual_seed(seed)
    gradients = torch.randn((nodes * 2, 64), generator=draw) * torch.rand((nodes * 2, 1), generator=draw)
    codecs = parse(first), parse(second)
    sums = through(codecs[0], gradients).view(nodes, 2, 64).sum(dim=1)
    reduced = through(codecs[1], sums).sum(dim=0)
    largest = float(gradients.abs().amax(dim=1).sum())
    error = float((reduced - gradients.sum(dim=0)).abs().max())
    assert error <= (composed(codecs) + 1e-5) * largest


def test_bounds_compose() -> None:
    """The bound of 4 bits is half a step, that of two such codecs a little more than twice as large."""
    four = parse("int4:256")
    assert composed([]) == 0
    assert composed([parse("fp32")]) < 1e-6
    assert composed([four]) == pytest.approx(1 / 14, rel=1e-3)
    assert composed([four, four]) == pytest.approx(2 / 14 + 1 / 14**2, rel=1e-3)
    assert relative_bound(parse("int2:64")) == pytest.approx(0.5, rel=1e-3)


def test_windows_are_drawn_where_the_gradients_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a gradient on a device, only the drawn windows reach the CPU, not the whole gradient."""
    policy, topology = preset("zeropp"), Topology(2, 2)
    unit = lay_out("u", [ParameterSpec("w", (2**22,))], grain=policy.grain, world=4, max_padding=0.1)
    (layout,) = layouts_of([unit], policy, topology)
    expected = FirstGradient([layout], seed=0, micro_batches=1, rounding=0.0)
    copied = list[int]()

    def arrive(values: torch.Tensor) -> torch.Tensor:
        copied.append(values.numel())
        return torch.zeros(values.shape)

    monkeypatch.setattr(torch.Tensor, "cpu", arrive)  # stands in for a copy from a GPU
    expected.add({"w": torch.empty(2**22, device="meta")}, 1.0)
    expected.compare(layout, 0, torch.empty(unit.shards, unit.piece, device="meta"), 1.0)
    assert copied
    assert max(copied) <= SAMPLED
