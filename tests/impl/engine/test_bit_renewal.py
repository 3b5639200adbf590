"""Tests that codecs are chosen anew within a budget: ranks agree, and bytes are as predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from impl import ops
from impl.codecs.codec import parse
from impl.comm.mesh import Mesh
from impl.engine.masters import Stepped
from impl.plan.bit_budget import shares_of
from impl.plan.memory import memory
from impl.plan.traffic import Decision
from impl.policy.policy import Feedback, LossScale, Policy, PolicyError, parse_budget
from impl.policy.presets import preset
from impl.policy.topology import Topology
from impl.zero import Zero, ZeroError, shard
from tests.support.history import History, gathered, history_of
from tests.support.ranks import each_rank, on_threads
from tests.support.strategies import ROOMY
from tests.support.training import batch, model, sgd, train, update

NET = model()
INITIAL = {"weights": parse("int4:8"), "gradients": (parse("int8:32"), parse("int4:8")), "memory": ROOMY}
BOTH = parse_budget("weights gradients every 2 of int2:8 int3:8 int6:8:stochastic int8:32 mxfp4")
KINDS = ("train", "train", "train", "accumulate", "evaluate", "skip", "rehearse", "drop", "again")


def begun(mesh: Mesh, policy: Policy) -> History:
    return History(mesh, NET, policy, optimize=sgd, max_norm=1.0)


def chosen(zero: Zero) -> list[Decision]:
    return zero.renewal.decisions


def _run(
    mesh: Mesh, policy: Policy, kinds: Sequence[str]
) -> tuple[list[Tensor], list[Decision], dict[str, int], Zero]:
    history = history_of(mesh, NET, policy, kinds, optimize=sgd, max_norm=1.0)
    rows = history.zero.wire.ledger.rows()  # buffers travel whatever the codecs
    foreseen = history.predicted(decisions=chosen(history.zero)).sent
    assert {k: sent for k, sent in rows.items() if k.purpose != "buffers"} == foreseen
    held = history.zero.memory()
    return gathered(history.zero), chosen(history.zero), held, history.zero


@given(
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=9),
    st.sampled_from([Topology(2, 2), Topology(3, 1), Topology(2, 1)]),
    st.sampled_from(["zero3", "hpz", "zero2", "zero1"]),
    st.sampled_from(
        [
            "weights gradients every 2 of int2:8 int3:8 int6:8:stochastic int8:32 mxfp4",
            "gradients 9 every 1 of int2:8 int8:8 bf16",
            "weights 9 every 3 of int2:32 nvfp4 int8:8",
        ]
    ),
    st.sampled_from([{}, {"chunks": 2}, {"feedback": Feedback(hops="all")}, {"reduce_every": "step"}]),
)
@example(
    ["train", "evaluate", "train", "train", "accumulate", "train", "rehearse", "train", "skip", "train"],
    Topology(2, 2), "hpz", str(BOTH), {"chunks": 2},
)  # fmt: skip
def test_ranks_agree_and_send_what_is_foreseen(
    kinds: list[str], topology: Topology, name: str, budget: str, changes: dict[str, object]
) -> None:
    """All ranks choose the same codecs within the budget and gather the same bits; ledgers and memory are as
    predicted.
    """
    policy = preset(name, **{**INITIAL, **changes}, budget=parse_budget(budget))
    runs = on_threads(topology, _run, policy, kinds)
    weights, decisions, _, zero = runs[0]
    units = [unit.geometry for unit in zero.units]
    for rank_weights, rank_decisions, held, _ in runs:
        assert rank_decisions == decisions
        assert all(map(torch.equal, weights, rank_weights))
        assert held.get("secondary", 0) <= memory(policy, topology, units)["secondary"]
    for share in shares_of(policy, topology, units):
        for step in {decision.step for decision in decisions}:
            codecs = {d.unit: d.codec for d in decisions if (d.step, d.purpose) == (step, share.purpose)}
            sizes = zip(share.units, share.bytes, strict=True)
            sent = [row[share.codecs.index(codecs[unit])] for unit, row in sizes if codecs]
            assert sum(sent) <= share.limit
    if kinds[0] == "train":
        assert {decision.step for decision in decisions} >= {1}


def test_a_decision_says_the_error_of_the_weights_that_are_sent() -> None:
    """The vNMSE in a decision about weights is that of all ranks' masters of the unit after encoding and decoding."""
    policy = preset("zero3", **INITIAL, budget=parse_budget("weights every 1 of int2:8 int6:8"))
    runs = on_threads(Topology(2, 2), train, NET, policy, 1)
    decisions = chosen(runs[0][2])
    for index, unit in enumerate(runs[0][2].units):
        (decision,) = [choice for choice in decisions if choice.unit == unit.geometry.name]
        error = value = 0.0
        for _, _, zero in runs:
            master = zero.units[index].master_shard.master
            frame = torch.empty(decision.codec.frame_bytes(master.numel()), dtype=torch.uint8)
            decoded = torch.empty_like(master)
            ops.encode(decision.codec, master, frame)
            ops.decode(decision.codec, frame, decoded)
            error += float((decoded.double() - master.double()).square().sum())
            value += float(master.double().square().sum())
        assert decision.vnmse == pytest.approx(error / value)


def _overflowing(mesh: Mesh, policy: Policy) -> tuple[list[bool], list[Decision], list[Tensor]]:
    """Make rank 1 meet an infinity in its first step, which is a measured step."""
    history = begun(mesh, policy)
    for step in range(3):
        history.act("spike" if step == 0 and mesh.rank == 1 else "train", step)
    done = [event.done for event in history.seen if isinstance(event, Stepped)]
    return done, chosen(history.zero), gathered(history.zero)


def test_what_a_skipped_step_measured_is_dropped() -> None:
    """After an overflow no rank chooses codecs; the next step is measured instead, and its errors are finite."""
    policy = preset("zero3", **INITIAL, budget=BOTH, loss_scale=LossScale(initial=4.0))
    (done, decisions, weights), *others = on_threads(Topology(2, 2), _overflowing, policy)
    assert done == [False, True, True]
    assert {decision.step for decision in decisions} == {1}
    assert all(0 <= decision.vnmse < 1 for decision in decisions)
    for _, rank_decisions, rank_weights in others:
        assert rank_decisions == decisions
        assert all(map(torch.equal, weights, rank_weights))


@each_rank(2, 1)
def test_gradients_that_are_not_finite_choose_nothing(mesh: Mesh) -> None:
    """Without a loss scale, a step with gradients that are not finite is taken, and the codecs are kept."""
    policy = preset("zero3", **INITIAL, budget=parse_budget("gradients every 1 of int2:8 int8:8"))
    zero = shard(net := model(), mesh=mesh, policy=policy)
    update(sgd(zero.param_groups(), lr=0.0), net(batch(0, mesh.rank)) * (torch.inf if mesh.rank == 0 else 1))
    assert chosen(zero) == []


@each_rank(2, 1)
def test_a_state_of_another_budget_is_refused(mesh: Mesh) -> None:
    """A policy without a budget refuses the state of one with a budget, and the other way round."""
    plain = preset("zero3", **INITIAL)
    engines = [shard(model(), mesh=mesh, policy=policy) for policy in (plain, replace(plain, budget=BOTH))]
    for zero, saved in (engines, engines[::-1]):
        with pytest.raises(ZeroError, match="state of the bit budget"):
            zero.load_communication_state(saved.communication_state())


def test_codecs_beyond_the_budget_are_refused_before_training() -> None:
    """The error names the least bits in a budget that the policy's own codecs fit into; a hundredth less is refused."""
    for bits in ("3", "7.99"):
        policy = preset("zero3", **INITIAL, budget=parse_budget(f"gradients {bits} every 1 of int2:8"))
        with pytest.raises(
            PolicyError,
            match=rf"allows {bits} bits for each element of gradients, but training begins with int4:8, which takes 8 "
            r"bits with scales and padding: set gradients to a smaller codec, or set 'gradients 8' in budget",
        ):
            on_threads(Topology(2, 1), train, NET, policy, 1)
    policy = preset("zero3", **INITIAL, budget=parse_budget("gradients 8 every 1 of int2:8"))
    on_threads(Topology(2, 1), train, NET, policy, 1)
