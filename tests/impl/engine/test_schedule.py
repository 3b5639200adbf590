"""Tests that a policy that changes while training trains, sends and holds what its spans say, step by step."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from impl.codecs.codec import BF16, FP32, parse
from impl.comm.mesh import Mesh
from impl.plan.memory import memory
from impl.policy.policy import Feedback, LossScale, Offload, Policy, PolicyError
from impl.policy.presets import preset
from impl.policy.spans import Span
from impl.policy.topology import Topology
from impl.zero import ZeroError, shard
from tests.impl.checkpoint.checkpointed import Run, same
from tests.support.history import gathered, history_of
from tests.support.ranks import each_rank, on_threads
from tests.support.strategies import ROOMY
from tests.support.training import close, mean_losses, model, sgd, single, train

NET = model()
INT4, INT8, NOISY = parse("int4:8"), parse("int8:8"), parse("int4:8:stochastic")
TOPOLOGIES = [Topology(2, 2), Topology(4, 1), Topology(3, 2)]
QUANTISED = {"weights": INT8, "gradients": (INT4, NOISY), "secondary": "node"}
EXACT = {"weights": FP32, "gradients": (FP32, FP32), "secondary": 0}
# What a span may change, in pairs of spans.
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "exact then zeropp": (EXACT, QUANTISED),
    "zeropp then exact": (QUANTISED, EXACT),
    "int8 then int4": ({"gradients": (INT8, INT8)}, {"gradients": (INT4, NOISY), "chunks": 2}),
    "flat then hops": ({"gather": "flat", "reduce": "ring"}, {"reduce": "one_hop"}),
    "hpZ in another type": ({"secondary": "node", "secondary_format": "bf16"}, {"secondary": "node", "weights": INT8}),
    "to differences": ({}, {"secondary": "node", "differences": INT4, "refresh": 2}),
    "differences in another codec": (
        {"secondary": "node", "differences": INT4}, {"secondary": "node", "differences": INT8},
    ),
    "feedback on": ({"gradients": (INT8, INT8)}, {"gradients": (INT4, INT4), "feedback": Feedback(hops="all")}),
    "sums": ({"gradients": (INT8, INT8), "sums": "fp16"}, {"gradients": (INT8, INT8)}),
}  # fmt: skip
BASE = Policy(memory=ROOMY, align=32)
SPANNED = replace(BASE, weights=FP32, gradients=(FP32, FP32))


def _of_spans(first: dict[str, Any], second: dict[str, Any], until: int = 2) -> Policy:
    return replace(BASE, schedule=(Span(until=until, **first), Span(**second)))


def _trained(  # noqa: PLR0917  # thread ranks pass by position
    mesh: Mesh, policy: Policy, steps: range, accumulation: int, folder: Path | None, keep: dict[int, Path]
) -> Any:
    """Losses and final state of some steps, from a checkpoint if there is a folder; ``keep`` has a folder for each
    number of steps after which a checkpoint is saved.
    """
    run = Run(mesh, policy, NET)
    if folder is not None:
        run.load(folder)
    losses = []
    for number in steps:
        losses.append(run.step(number, accumulation))
        if number + 1 in keep:
            run.save(keep[number + 1])
    return losses, run.zero.full_state_dict(), run.zero.clock.step


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("name", PAIRS)
def test_two_spans_train_as_two_runs_with_a_checkpoint_between(
    name: str, accumulation: int, topology: Topology, tmp_path: Path
) -> None:
    """Training by spans A then B equals, to the bit, training by A, saving, loading into B, and training by B."""
    policy = _of_spans(*PAIRS[name])
    first, second = (replace(phase, align=policy.grain) for phase in policy.phases)
    whole = on_threads(topology, _trained, policy, range(4), accumulation, None, {})
    before = on_threads(topology, _trained, first, range(2), accumulation, None, {2: tmp_path})
    after = on_threads(topology, _trained, second, range(2, 4), accumulation, tmp_path, {})
    for (losses, state, steps), (early, _, _), (late, final, _) in zip(whole, before, after, strict=True):
        assert (losses, steps) == (early + late, 4)
        assert same(state, final)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("name", ["exact", "zeropp", "sdp4bit", "loco", "zero2"])
def test_one_span_trains_as_the_plain_policy(name: str, topology: Topology) -> None:
    """A schedule whose only span is the whole run gives the bits of the policy with the span's fields."""
    plain = preset(name, memory=ROOMY)
    spanned = replace(plain, weights=BF16, gradients=(BF16, BF16), feedback=None, align=plain.grain)
    fields = {name: getattr(plain, name) for name in ("weights", "gradients", "feedback")}
    if spanned.secondary_format == "frames" and spanned.differences is not None:
        spanned = replace(spanned, secondary_format="bf16")
        fields["secondary_format"] = "frames"
    spanned = replace(spanned, schedule=(Span(**fields),))
    assert spanned.phases == (replace(plain, align=plain.grain),)
    for ours, theirs in zip(
        on_threads(topology, _trained, spanned, range(3), 2, None, {}),
        on_threads(topology, _trained, spanned.phases[0], range(3), 2, None, {}),
        strict=True,
    ):
        assert ours[0] == theirs[0]
        assert same(ours[1], theirs[1])


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_exact_spans_train_as_one_process(topology: Topology, accumulation: int) -> None:
    """Spans that change the order of exact messages, and hpZ, leave losses and weights as in a single process.

    A span in a coarse codec does not, so that the comparison would find one that is begun in another step.
    """
    exact = {"weights": FP32, "gradients": (FP32, FP32)}
    spans = (
        Span(until=1, gather="flat", reduce="ring", **exact),
        Span(until=3, every=2, secondary="node", secondary_format="fp32", **exact),
        Span(reduce="one_hop", **exact),
    )
    whole = copy.deepcopy(NET)
    losses = single(whole, topology.world, 4, accumulation)
    ranks = on_threads(topology, train, NET, replace(SPANNED, schedule=spans), 4, accumulation)
    assert mean_losses(ranks) == pytest.approx(losses, rel=1e-4)
    assert all(close(state, whole.state_dict(), 1e-4) for _, state, _ in ranks)
    coarse = (*spans[:-1], Span(reduce="one_hop", **exact | {"gradients": (parse("int2:8"),) * 2}))
    other = on_threads(topology, train, NET, replace(SPANNED, schedule=coarse), 4, accumulation)
    assert not close(other[0][1], whole.state_dict(), 1e-3)


@pytest.mark.parametrize("name", PAIRS)
def test_a_resumed_run_goes_on_in_the_span_of_its_step(name: str, tmp_path: Path) -> None:
    """A checkpoint before, at and after the boundary of two spans resumes to the bit, with the state of both."""
    policy, topology = _of_spans(*PAIRS[name]), Topology(2, 2)
    whole = on_threads(topology, _trained, policy, range(5), 1, None, {})
    folders = {saved: tmp_path / str(saved) for saved in (1, 2, 3)}
    on_threads(topology, _trained, policy, range(3), 1, None, folders)
    for saved, folder in folders.items():
        resumed = on_threads(topology, _trained, policy, range(saved, 5), 1, folder, {})
        for ours, theirs in zip(whole, resumed, strict=True):
            assert ours[0][saved:] == theirs[0], saved
            assert same(ours[1], theirs[1]), saved


def test_a_state_that_does_not_fit_leaves_the_span_as_it_is() -> None:
    """A state of a later span with the numbers of a bit budget is refused, and the engine stays in its own span."""

    def refused(mesh: Mesh) -> Policy:
        run = Run(mesh, _of_spans(*PAIRS["exact then zeropp"]), NET)
        state = run.zero.communication_state() | {"step": torch.tensor(3), "budget": torch.zeros(4)}
        with pytest.raises(ZeroError, match="bit budget has 4 numbers, expected 0"):
            run.zero.load_communication_state(state)
        return run.zero.current_policy

    policy = _of_spans(*PAIRS["exact then zeropp"])
    assert on_threads(Topology(2, 1), refused) == [policy.phases[0]] * 2


KINDS = (
    "train",
    "train",
    "train",
    "accumulate",
    "evaluate",
    "skip",
    "rehearse",
    "drop",
    "again",
    "save",
    "by hand",
)


def _history(mesh: Mesh, policy: Policy, kinds: Sequence[str]) -> tuple[list[Tensor], dict[str, int], int]:
    history = history_of(mesh, NET, policy, kinds, optimize=sgd)
    rows = history.zero.wire.ledger.rows()
    foreseen = history.predicted().sent
    assert {key: sent for key, sent in rows.items() if key.purpose not in ("buffers", "state")} == foreseen
    held = history.zero.memory()
    step = history.zero.clock.step
    assert history.zero.current_policy == policy.policy_at(step)
    return gathered(history.zero), held, step


@given(
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=9),
    st.sampled_from(TOPOLOGIES),
    st.sampled_from(sorted(PAIRS)),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from(["", "zero2", "step", "persistent"]),
)
@example(
    ["train", "evaluate", "train", "evaluate", "train", "rehearse", "train"],
    Topology(2, 2),
    "to differences",
    2,
    2,
    "",
)
@example(
    ["train", "evaluate", "train", "train", "again", "train"],
    Topology(3, 2),
    "exact then zeropp",
    1,
    2,
    "persistent",
)
def test_ranks_agree_and_send_what_is_foreseen(  # noqa: PLR0917  # hypothesis passes by position
    kinds: list[str], topology: Topology, name: str, until: int, every: int, kind: str
) -> None:
    """Whatever is called between steps, all ranks gather the same bits, and ledgers and memory are as predicted."""
    first, second = PAIRS[name]
    base = BASE
    match kind:
        case "zero2":
            base = replace(base, stage=2)
        case "step":
            base = replace(base, reduce_every="step")
        case "persistent":
            base = replace(base, memory=replace(ROOMY, persist_below=30))
    try:
        policy = replace(base, schedule=(Span(until=until, every=every, **first), Span(**second)))
        policy.check(topology)
    except PolicyError:  # a stage without hpZ, and groups that do not fit
        return
    (weights, held, _), *others = on_threads(topology, _history, policy, kinds)
    units = [unit.geometry for unit in _units(topology, policy)]
    foreseen = memory(policy, topology, units)
    assert held.get("secondary", 0) == foreseen["secondary"]
    assert held.get("feedback", 0) == foreseen["feedback"]
    for other, _, _ in others:
        assert all(map(torch.equal, weights, other))


def _units(topology: Topology, policy: Policy) -> list[Any]:
    return on_threads(topology, lambda mesh: shard(model(), mesh=mesh, policy=policy).units)[0]


@each_rank(2, 2)
def test_errors_wait_in_steps_without_feedback(mesh: Mesh) -> None:
    """In alternating steps, errors that int4 steps carry stay as they are in the bf16 steps between them."""
    spans = (Span(every=2, gradients=(BF16, BF16), feedback=None),)
    policy = replace(BASE, gradients=(INT4, INT4), feedback=Feedback(hops="all"), schedule=spans)
    run = Run(mesh, policy, NET)

    def errors() -> dict[str, Tensor]:
        state = run.zero.communication_state()
        return {name: value for name, value in state.items() if "/hop" in name}

    run.step(0)
    assert not any(error.any() for error in errors().values())
    run.step(1)
    carried = errors()
    assert any(error.any() for error in carried.values())
    run.step(2)
    assert same(errors(), carried)


@each_rank(2, 2)
def test_a_boundary_allocates_nothing_that_spans_share(mesh: Mesh) -> None:
    """The copy of hpZ and carried errors have their memory from the start, and both spans keep them there."""
    policy = _of_spans(
        {"secondary": "node", "secondary_format": "fp32"}, {"secondary": "node", "weights": INT8}
    )
    run = Run(mesh, policy, NET)
    held = run.zero.memory()["secondary"]
    places = set[int]()
    for number in range(4):
        run.step(number)
        places |= {unit.weight_gather.secondary._frames.data_ptr() for unit in run.zero.units}
    assert len(places) == len(run.zero.units)
    assert run.zero.memory()["secondary"] == held


@each_rank(2, 2)
def test_an_overflow_delays_the_boundary(mesh: Mesh) -> None:
    """A step that is skipped because of an overflow is no optimizer step, so that the span lasts one step longer."""
    policy = replace(
        BASE, loss_scale=LossScale(initial=4.0), schedule=(Span(until=1, gradients=(INT8, INT8)), Span())
    )
    history = history_of(mesh, NET, policy, ["spike"], optimize=sgd)
    assert history.zero.current_policy.gradients == (INT8, INT8)
    history.act("train", 1)
    assert history.zero.current_policy.gradients == (BF16, BF16)


@each_rank(2, 2)
def test_offload_lets_gradients_change(mesh: Mesh) -> None:
    """With offload, the codecs of gradients may change; the ledger and the copies are as predicted."""
    policy = replace(
        BASE,
        offload=Offload(optimizer=0.5, weights=0.5),
        schedule=(Span(until=1, gradients=(INT8, INT8)), Span()),
    )
    history = history_of(mesh, NET, policy, ["train"] * 3, optimize=sgd)
    book = history.predicted()
    rows = history.zero.wire.ledger.rows()
    assert {key: sent for key, sent in rows.items() if key.purpose != "buffers"} == book.sent
    assert history.zero.copied() == book.copied


@each_rank(2, 2)
def test_a_schedule_in_shares_needs_the_number_of_steps(mesh: Mesh) -> None:
    """Without the number of steps, shard() refuses a schedule in shares, and says how to give it."""
    policy = replace(BASE, schedule=(Span(until="50 %", gradients=(INT8, INT8)), Span()))
    with pytest.raises(PolicyError, match=r"policy\.for_steps\(steps\)"):
        shard(model(), mesh=mesh, policy=policy)
    assert shard(model(), mesh=mesh, policy=policy.for_steps(8)).current_policy.gradients == (INT8, INT8)
