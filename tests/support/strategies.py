"""Hypothesis strategies shared by the tests: codecs, hostile blocks, topologies, policies."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from impl.codecs.codec import (
    BF16,
    FP16,
    FP32,
    MX_BLOCK,
    Block,
    Blocked,
    Codec,
    FloatCodec,
    IntCodec,
    parse,
)
from impl.codecs.rounding_noise import Key
from impl.policy.policy import Feedback, MemoryLimits, Offload, Policy, PolicyError
from impl.policy.presets import preset
from impl.policy.topology import Topology

ROOMY = MemoryLimits(max_padding=1e9)  # tiny test models are mostly padding
EXACT = preset("exact", memory=ROOMY)

raw_codecs = st.sampled_from([FP32, BF16, FP16])


any_block: st.SearchStrategy[Block] = st.one_of(st.integers(1, 70), st.just("shard"))
_ELEMENTS = st.sampled_from(["e4m3", "e5m2"])


def int_codecs(blocks: st.SearchStrategy[Block] = any_block) -> st.SearchStrategy[IntCodec]:
    """Integer codecs of any width, block and scheme."""
    bits = st.integers(2, 8)
    clipped = st.builds(partial(IntCodec, clipped=True), bits, blocks)
    return st.one_of(st.builds(IntCodec, bits, blocks, st.booleans()), clipped)


def float_codecs(blocks: st.SearchStrategy[Block] = any_block) -> st.SearchStrategy[FloatCodec]:
    """Floats of 8 bits with blocks of any size, and the MX formats."""
    mx = [FloatCodec(element, MX_BLOCK, "e8m0") for element in ("e4m3", "e5m2", "e2m1")]
    return st.one_of(st.builds(FloatCodec, _ELEMENTS, blocks), st.sampled_from(mx))


@st.composite
def rotated_codecs(draw: st.DrawFn) -> Blocked:
    """Codecs that rotate 2 to 32 elements, in blocks of a few times as many."""
    size = draw(st.sampled_from([2, 4, 8, 16, 32]))
    blocks: st.SearchStrategy[Block] = st.sampled_from([size, 2 * size, 3 * size, "shard"])
    return replace(draw(st.one_of(int_codecs(blocks), float_codecs(blocks))), hadamard=size)


blocked_codecs: st.SearchStrategy[Blocked] = st.one_of(int_codecs(), float_codecs(), rotated_codecs())
codecs: st.SearchStrategy[Codec] = st.one_of(raw_codecs, blocked_codecs)  # that need no noise
stochastic_codecs: st.SearchStrategy[Blocked] = blocked_codecs.map(
    lambda codec: (
        replace(codec, stochastic=True)
        if isinstance(codec, FloatCodec)
        else replace(codec, stochastic=True, clipped=False)
    )
)
keys = st.builds(
    Key,
    seed=st.integers(0, 2**63),
    step=st.integers(0, 2**31),
    micro_batch=st.integers(0, 9),
    unit=st.sampled_from(["embedding", "blocks.0", "a/b"]),
    purpose=st.sampled_from(["weights", "gradients"]),
    hop=st.integers(0, 1),
    source=st.integers(-1, 9),
)

_HOSTILE = np.array(
    [0.0, -0.0, 1e-45, -1e-45, 1.17e-38, 3.4028234e38, -3.4028234e38, 1.0, -1.0, 65504.0, 1e-20],
    dtype=np.float32,
)


@st.composite
def blocks_of_values(draw: st.DrawFn, *, most: int = 150, finite: bool = True) -> Tensor:
    """(n,) fp32: normals of one scale, some replaced by spikes, denormals, zeros and extremes."""
    numel = draw(st.integers(1, most))
    seed = draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    values = random.standard_normal(numel).astype(np.float32) * np.float32(10.0 ** draw(st.integers(-37, 37)))
    shape = draw(st.sampled_from(["normal", "equal", "alternating", "zero", "spike"]))
    if shape == "equal":
        values[:] = values[0]
    elif shape == "alternating":
        values = np.abs(values) * np.where(np.arange(numel) % 2, -1, 1).astype(np.float32)
    elif shape == "zero":
        values[:] = 0.0
    elif shape == "spike":
        at = random.integers(numel)
        values[at] = np.clip(np.float64(values[at]) * 1000, -3.4e38, 3.4e38)
    for position in draw(st.lists(st.integers(0, numel - 1), max_size=4)):
        values[position] = draw(st.sampled_from(list(_HOSTILE)))
    if not finite:
        broken = draw(st.lists(st.integers(0, numel - 1), min_size=1, max_size=2))
        for position in broken:
            values[position] = draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    else:
        values = np.clip(np.nan_to_num(values), -3.4028234e38, 3.4028234e38).astype(np.float32)
    return torch.from_numpy(values)


def topologies(most: int = 6) -> st.SearchStrategy[Topology]:
    """Topologies of at most ``most`` ranks, odd counts included."""
    pairs = [(n, r) for n in range(1, most + 1) for r in range(1, most + 1) if n * r <= most]
    return st.builds(lambda pair: Topology(*pair), st.sampled_from(pairs))


def secondaries(topology: Topology) -> list[int]:
    """All hpZ group sizes that fit, 0 first."""
    fits = []
    for ranks in range(topology.world + 1):
        with contextlib.suppress(ValueError):
            topology.check_group("an hpZ group", ranks)
            fits.append(ranks)
    return fits


engine_codecs: st.SearchStrategy[Codec] = st.one_of(
    int_codecs(st.sampled_from([1, 8, 32, "shard"])),
    st.sampled_from(
        ["mxfp8", "mxfp4:stochastic", "fp8e5m2:32", "int4:32:hadamard8", "int4:8:stochastic"]
    ).map(parse),
)
feedbacks = st.builds(
    Feedback,
    decay=st.sampled_from([0.0, 0.8]),
    reset=st.sampled_from([0, 2]),
    hops=st.sampled_from(["last", "all"]),
    state=st.sampled_from(["fp32", "bf16", "fp16"]),
)


limits = st.builds(  # around the sizes of the tests' models
    MemoryLimits,
    max_padding=st.just(1e9),
    prefetch=st.sampled_from([0, 200, 10**6]),
    max_live=st.sampled_from([0, 3000, 10**9]),
    max_reuse=st.sampled_from([0, 1, 2000, 10**9]),
    persist_below=st.sampled_from([0, 0, 20, 10**9]),
    reduce_bucket=st.sampled_from([0, 2000, 10**9]),
)


@st.composite
def policies(
    draw: st.DrawFn, topology: Topology, *, whole_world: bool = False, offload: Offload | None = None
) -> Policy:
    """Policies that fit ``topology``, with small blocks: each drawn field is set if the policy allows it.

    ``whole_world``: only those that shard over all ranks; ``offload``: only with this.
    """
    codec, groups = st.one_of(raw_codecs, engine_codecs), st.sampled_from(secondaries(topology))
    maybe, few = st.none() | codec, st.sampled_from([0, 1, 2])
    fields: dict[str, st.SearchStrategy[Any]] = {
        "stage": st.sampled_from([3, 3, 3, 2, 1] if whole_world else [3, 3, 3, 2, 1, 0]),
        "gather": st.sampled_from(["hierarchical", "hierarchical", "flat"]),
        "reduce": st.sampled_from(["two_hop", "two_hop", "one_hop", "ring"]),
        "group": st.just(0) if whole_world else st.just(0) | groups,
        "weights": codec,
        "gradients": st.tuples(codec, codec) | codec.map(lambda drawn: (drawn, drawn)),
        "chunks": st.sampled_from([1, 1, 2, 3]),
        "secondary": groups,
        "secondary_format": st.sampled_from(["frames", "frames", "bf16", "fp16", "fp32"]),
        "inside": maybe,
        "differences": maybe,
        "refresh": few,
        "feedback": st.none() | feedbacks,
        "reduce_every": st.sampled_from(["stage", "step", "micro_batch"]),
        "frozen": maybe,
        "memory": limits,
        "order_every": few,
    }
    policy = Policy(memory=ROOMY, offload=offload or Offload())
    for name, values in fields.items():
        value = draw(values)
        with contextlib.suppress(PolicyError):
            changed = replace(policy, **{name: value})
            changed.check(topology)
            policy = changed
    return policy


@st.composite
def as_published(draw: st.DrawFn, policy: Policy) -> Policy:
    """``policy``, some with sums in fp16, blocks by shape and two planes, where they are allowed."""
    planes = draw(st.sampled_from([2, "phase"]))
    for name, value in {"sums": "fp16", "blocks": "shape", "planes": planes}.items():
        with contextlib.suppress(PolicyError):
            policy = replace(policy, **{name: value}) if draw(st.booleans()) else policy  # type: ignore[arg-type]
    return policy
