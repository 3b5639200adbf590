"""Policies are values with presets and text forms; impossible combinations are refused."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from impl.codecs.codec import BF16, FP16, FP32, parse
from impl.policy.policy import (
    BitBudget,
    Feedback,
    LossScale,
    MemoryLimits,
    Offload,
    Policy,
    PolicyError,
    parse_budget,
    parse_feedback,
    parse_loss_scale,
    weight_block,
)
from impl.policy.presets import PRESETS, preset
from impl.policy.topology import Topology
from tests.support.strategies import feedbacks

MXFP8 = parse("mxfp8")


@given(st.integers(1, 8), st.integers(1, 8))
def test_the_papers_baseline_is_zero3_on_flat_rings(nodes: int, ranks: int) -> None:
    """``zero3-flat`` gathers and reduces over all ranks at once, in 16 bits; all else is as in ``zero3``."""
    flat, topology = PRESETS["zero3-flat"], Topology(nodes, ranks)
    assert flat.gather_axes(topology) == ((topology.world_axis,), 0)
    assert (flat.gather, flat.reduce, flat.weights, flat.gradients) == ("flat", "ring", BF16, (BF16, BF16))
    world = [topology.world] if topology.world > 1 else []
    assert [axis.size for axis, _ in flat.reduce_axes(topology)] == world
    assert replace(flat, gather="hierarchical", reduce="two_hop") == PRESETS["zero3"]


COPY: dict[str, Any] = {"secondary": "node", "secondary_format": "bf16", "differences": parse("int4:32")}
PLANES: dict[str, Any] = {"planes": 2, "weights": MXFP8}
PHASE = PLANES | {"planes": "phase"}
SHAPE: dict[str, Any] = {"blocks": "shape"}
WEIGHTS, GRADIENTS = (
    {"budget": parse_budget(f"{purpose} every 5 of int4:32")} for purpose in ("weights", "gradients")
)
SHARD, INT8, HOST = parse("int8:shard"), parse("int8:32"), Offload(optimizer=1.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gradients": BF16}, "expected a tuple of two codecs, for the hops inside and between nodes"),
        ({"weights": "int8:32"}, "codec 'int8:32' is a str: expected a codec"),
        ({"stage": 4}, "stage = 4: expected one of 0, 1, 2, 3"),
        ({"reduce": "twohop"}, "reduce = 'twohop': expected one of ring, one_hop, two_hop"),
        ({"secondary": 2, "secondary_format": "int8:64"}, "expected one of frames, fp32, bf16, fp16"),
        ({"align": 0}, "align=0, order_every=32, refresh=0: expected chunks 1 to 8, align 1 or more"),
        ({"chunks": 9}, "chunks=9, .*: expected chunks 1 to 8"),
        ({"gather": "flat", "secondary": 2}, "needs stage 3, group=0 and .*; here .*gather='flat'"),
        ({"reduce": "one_hop", "gradients": (BF16, FP32)}, "has one hop"),
        (
            {"reduce": "ring", "feedback": Feedback()},
            "here sums='fp32', feedback=classic: set reduce='two_hop'",
        ),
        ({"reduce": "one_hop", "chunks": 2}, "reduce='one_hop' has one hop.* chunks=2: set reduce='two_hop'"),
        (
            {"gradients": (SHARD, BF16), "chunks": 2},
            "chunks=2 cuts a shard, for which int8:shard has a single",
        ),
        ({"stage": 1, "reduce_every": "micro_batch"}, "reduce_every='micro_batch' needs .* here stage 1"),
        ({"stage": 2, "secondary": "node"}, "secondary='node'.* needs stage 3.* here stage 2"),
        ({"group": 2, "secondary": 2}, "secondary=2.* needs .* here stage 3, group=2"),
        ({"stage": 0, "group": 2}, "group=2 needs stage 1 to 3, .* here stage 0"),
        ({"group": "node", "reduce": "ring"}, "group='node' needs .* gather='hierarchical', reduce='ring'"),
        ({"sums": "fp16", "reduce": "ring"}, "here sums='fp16', feedback=none: set reduce='two_hop'"),
        (
            SHAPE | {"weights": MXFP8},
            "blocks='shape' chooses the size of blocks, but the size of mxfp8's blocks is fixed",
        ),
        (SHAPE | {"weights": parse("int4:32:hadamard8")}, "the size of int4:32:hadamard8's blocks is fixed"),
        ({"planes": 2}, "planes=2 needs a codec with blocks, .* here weights=bf16"),
        ({"planes": 2, "weights": SHARD}, "here weights=int8:shard"),
        (PLANES | {"stage": 2}, "planes=2 needs .* here stage 2"),
        (PLANES | {"secondary": 2}, "planes=2 needs .* here stage 3, secondary=2"),
        (PLANES | {"offload": HOST}, "planes=2 needs .* here .* offload.optimizer=1"),
        ({"planes": "phase"}, "planes='phase' needs a codec with blocks, .* here weights=bf16"),
        (PHASE | {"stage": 2}, "planes='phase' needs stage 3, .* here stage 2,"),
        (
            {"weights": parse("lossless:zlib")},
            "lossless:zlib cannot be sent, since its number of bytes depends",
        ),
        (
            {"gradients": (BF16, parse("lossless:zstd:bf16"))},
            "send gradients with reduce='examples.lossless:",
        ),
        (PHASE | {"offload": HOST}, "planes='phase' needs .* no offload; .* offload.optimizer=1"),
        (PHASE | COPY, "planes='phase' needs .* secondary_format='bf16', .* differences=int4:32"),
        ({"secondary_format": "bf16"}, "secondary_format='bf16' needs hpZ: set secondary='node'"),
        (COPY | {"secondary": 0, "secondary_format": "frames"}, "differences='int4:32' needs hpZ"),
        (COPY | {"secondary_format": "frames", "weights": INT8}, "needs hpZ's copy in .* here .* in int8:32"),
        (COPY | {"offload": HOST}, "and no offload; here the copy is in bf16"),
        (COPY | {"refresh": -1}, "refresh=-1"),
        ({"secondary": 2, "refresh": 2}, "refresh=2 has no effect without differences"),
        ({"secondary": 2, "inside": parse("int8:32:stochastic")}, "needs a codec that rounds to nearest"),
        (COPY | {"inside": BF16}, "inside='bf16' needs .* secondary_format='frames'"),
        (
            {"secondary": 2, "inside": BF16, "offload": Offload(weights=1.0)},
            "needs .* offload.weights=0; here",
        ),
        (GRADIENTS | {"stage": 0}, "needs stage 1 to 3, .* here stage 0"),
        (WEIGHTS | {"group": "node"}, "needs .* group=0, .* here .* group='node'"),
        (GRADIENTS | {"reduce": "one_hop"}, "hop between nodes, and reduce='one_hop' has one hop"),
        (WEIGHTS | COPY, "which differences and offload do not allow"),
        (WEIGHTS | {"offload": Offload(optimizer=0.5)}, "which differences and offload do not allow"),
        (WEIGHTS | SHAPE, "needs .* blocks='codec' .* here .* blocks='shape'"),
        (WEIGHTS | {"weights": SHARD}, "int8:shard has one scale for a whole shard"),
        ({"budget": parse_budget("gradients every 5 of int4:shard")}, "int4:shard has one scale for a whole"),
        ({"budget": parse_budget("weights every 5 of mine:Codec")}, "mine:Codec is a codec of your own"),
        ((MemoryLimits, {"max_reuse": -1}), r"memory\.max_reuse = -1: expected 0 or more"),
        ((MemoryLimits, {"max_padding": math.nan}), "max_padding = nan: expected 0 or more"),
        ((Offload, {"optimizer": math.nan}), r"offload\.optimizer = nan: expected 0 to 1"),
        ((Feedback, {"hops": "lst"}), "expected one of"),
        ((Feedback, {"decay": 1.0}), r"expected a decay in \[0, 1\)"),
    ],
)
def test_what_cannot_be_is_refused(fields: Any, message: str) -> None:
    """A policy, or a part of it, that no topology could run is refused in one line where it is made."""
    kind, values = fields if isinstance(fields, tuple) else (Policy, fields)
    with pytest.raises(PolicyError, match=message) as caught:
        kind(**values)
    assert "\n" not in str(caught.value)


def test_unknown_names_are_refused() -> None:
    """An unknown preset or field is refused, and the error lists the known ones."""
    with pytest.raises(PolicyError, match="unknown policy 'zero4': expected one of exact, zero0, zero1"):
        preset("zero4")
    for other in (5, ["zeropp"], None):
        with pytest.raises(PolicyError, match=re.escape(f"unknown policy {other!r}: expected one of exact")):
            preset(other)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="unknown policy field 'bits'"):
        preset("zero3", bits=4)


@pytest.mark.parametrize(
    ("policy", "fits", "other", "message"),
    [
        (preset("hpz", secondary=3), Topology(2, 3), Topology(2, 2), "3 ranks does not fit 2 nodes"),
        (Policy(**GRADIENTS), Topology(2, 1), Topology(1, 4), "between nodes, and 1x4 has one node"),
    ],
)
def test_a_topology_that_does_not_fit_is_refused_there_and_not_before(
    policy: Policy, fits: Topology, other: Topology, message: str
) -> None:
    """A group of the wrong size, and a budget for the hop between nodes on one node, are refused by ``check`` only."""
    policy.check(fits)
    with pytest.raises(PolicyError, match=message):
        policy.check(other)


EXPECTED = r"expected none, or '\[weights \[bits\]\] \[gradients \[bits\]\] every"


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (parse_feedback, "locko", "expected none, classic or loco"),
        (parse_feedback, "loco:all:last", "option 'last' is unknown or given twice"),
        (parse_feedback, "classic:decay1.0", "expected a decay in"),
        (parse_budget, "gradients 4.5", EXPECTED),
        (parse_budget, "every 50 of int4:128", EXPECTED),
        (parse_budget, "gradients every 5 of int4", "codec 'int4'"),
        *(
            (parse_loss_scale, text, "loss scale")
            for text in ("", "dynamic:from0", "dynamic:window0", "dynamic:window2:window3", "-1", "fast")
        ),
    ],
)
def test_impossible_texts_are_refused(read: Callable[[str], object], text: str, message: str) -> None:
    """A text that is no feedback, budget or loss scale is refused in one line that says what is allowed."""
    with pytest.raises(ValueError, match=message) as caught:
        read(text)
    assert "\n" not in str(caught.value)


BITS = st.none() | st.floats(0, 32).map(lambda bits: round(bits, 3))
CODECS = st.lists(
    st.sampled_from(["int4:128", "bf16", "nvfp4", "int4:128:hadamard32"]), min_size=1, unique=True
)
TEXTS: dict[Callable[[str], Any], st.SearchStrategy[Any]] = {  # by their parser
    parse_feedback: feedbacks | st.just(Feedback(decay=0.8, reset=1024, hops="all")),
    parse_loss_scale: st.builds(
        lambda initial, window: LossScale(initial=initial, window=window, least=min(1.0, initial)),
        st.sampled_from([65536.0, 1.0]) | st.floats(1e-3, 1e30),
        st.sampled_from([1000, 0]) | st.integers(0, 10**6),
    ),
    parse_budget: st.builds(
        lambda both, every, codecs: BitBudget(weights=both[0], gradients=both[1], every=every, codecs=codecs),
        st.tuples(BITS, BITS).filter(any),
        st.integers(1, 10**6),
        CODECS.map(lambda texts: tuple(map(parse, texts))),
    ),
}


@pytest.mark.parametrize("read", TEXTS)
@given(data=st.data())
def test_texts_read_back(read: Callable[[str], Any], data: st.DataObject) -> None:
    """Parsing the text of a feedback, loss scale or budget gives the same value, up to a scale's seventh digit."""
    setting = data.draw(TEXTS[read])
    parsed = read(str(setting))
    assert str(parsed) == str(setting)
    if isinstance(parsed, LossScale):
        assert parsed.initial == pytest.approx(setting.initial, rel=1e-5)
        setting = replace(setting, initial=parsed.initial, least=parsed.least)
    assert parsed == setting


def test_states_in_a_group_are_gathered_inside_and_reduced_over_all() -> None:
    """MiCS gathers weights inside a group; gradients are reduced over all ranks, then gathered between the groups."""
    topology = Topology(2, 4)
    policy = Policy(group=2, gradients=(BF16, parse("int4:64")))
    axes, spared = policy.gather_axes(topology)
    assert ([(axis.size, axis.stride) for axis in axes], spared) == ([(2, 1)], 0)
    hops = [(axis.size, axis.stride, str(codec)) for axis, codec in policy.reduce_axes(topology)]
    assert hops == [(2, 1, "bf16"), (2, 2, "bf16"), (2, 4, "int4:64")]
    between, codec = policy.replica_axes(topology)
    assert [(axis.size, axis.stride) for axis in between] == [(2, 4), (2, 2)]
    assert str(codec) == "int4:64"
    assert Policy().replica_axes(topology)[0] == ()
    assert [axis.size for axis in Policy(stage=0).replica_axes(topology)[0]] == [2, 4]


def test_small_parameters_are_sent_unquantised() -> None:
    """The persistent unit has a policy of stage 2, in the compute type where the model's policy quantises."""
    for codec in (FP32, BF16, FP16):
        small = preset("zeropp", compute=codec.dtype).for_kind(persistent=True)
        assert (small.stage, small.weights, small.gradients, small.secondary) == (2, codec, (codec, codec), 0)
    assert preset("zero3").for_kind(persistent=True).weights == BF16
    assert preset("exact").for_kind(persistent=True).weights == FP32
    frozen = preset("zeropp", frozen=parse("int8:64")).for_kind(trainable=False)
    assert str(frozen.weights) == "int8:64"


def _deepspeeds_groups(numel: int) -> int:
    """Returns the blocks of weights that the search of DeepSpeed's ``CUDAQuantizer`` finds, step by step."""
    groups = math.ceil(numel / 8000)
    while groups < numel and numel % (8 * groups) != 0:
        groups += 1
    while numel % (8 * groups * 2) == 0 and numel / groups > 8000:
        groups *= 2
    return groups


@given(st.integers(1, 60_000))
@example(7)  # below 8000: one block
@example(3137)  # of a shard of 32 times a prime
def test_blocks_of_weights_are_those_of_deepspeeds_search(times: int) -> None:
    """For any shard that can be laid out (a multiple of 32), blocks are as large as DeepSpeed's, and whole."""
    shard = 32 * times
    assert weight_block(shard) * _deepspeeds_groups(shard) == shard


SHAPES = st.lists(st.lists(st.integers(1, 96), min_size=1, max_size=3), min_size=1, max_size=5)


@given(SHAPES, st.integers(1, 128), st.integers(1, 9))
def test_blocks_by_shape_are_deepspeeds_of_the_largest_matrix(
    shapes: list[list[int]], world: int, times: int
) -> None:
    """Both hops have DeepSpeed's blocks, or are not quantised without a matrix; weights have blocks of the shard."""
    policy = PRESETS["zeropp-shipped"]
    matrices = [shape for shape in shapes if len(shape) > 1]
    shaped = policy.by_shape(shapes, world, 32 * times)
    assert shaped.weights == replace(policy.weights, block=weight_block(32 * times))
    if matrices:
        largest = max(matrices, key=math.prod)
        block = max(1, math.prod(largest) // max(*largest[:2], world))
        assert shaped.gradients == (parse(f"int4:{block}:clip"),) * 2
        assert shaped.sums == "fp16"
    else:
        assert (shaped.gradients, shaped.sums) == ((FP32, FP32), "fp32")
    same = replace(shaped, weights=policy.weights, gradients=policy.gradients, sums="fp16", blocks="shape")
    assert same == policy
    assert preset("zeropp").by_shape(shapes, world, 32 * times) == preset("zeropp")


def test_a_unit_without_a_matrix_is_sent_once() -> None:
    """A unit of vectors has one plane; if the shapes are not known, it has the policy's."""
    for planes in (2, "phase"):
        policy = preset("mxfp8-planes", planes=planes)
        for shapes, wanted in (([(32,), (64,)], 1), ([(32,), (8, 8)], planes), ([], planes)):
            assert policy.by_shape(shapes, 4).planes == wanted
        assert policy.for_kind(persistent=True).planes == 1
        assert replace(policy, frozen=FP16).for_kind(trainable=False).planes == 1


def test_a_decided_policy_keeps_the_layout() -> None:
    """Whichever codec a budget chose, grain and other codecs stay; units that are not trained have no budget."""
    policy = Policy(
        weights=parse("int8:96"), budget=parse_budget("weights gradients every 5 of int4:128 int6:64")
    )
    for purpose, codecs in policy.candidates.items():
        for codec in codecs:
            decided = policy.with_choice(purpose, codec)
            assert decided.grain == policy.grain == 384
            assert decided.gradients[0] == policy.gradients[0]
    assert policy.for_kind(trainable=False).budget is policy.for_kind(persistent=True).budget is None
