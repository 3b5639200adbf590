"""A repeat of a trial that lies about its losses, bytes or seconds fails, and the message names the lie.

Every sabotage is made inside real ranks, in a repeat that measures no errors of its own accord.  Some sabotages also
spoil the code that a check calls, to show that the check does not rest on it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partialmethod
from typing import Any, Final
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import impl.comm.wire
import impl.plan.traffic
from harness.cluster.rank import Rank
from harness.cluster.rank_processes import run_ranks
from harness.measure.step_clock import StepClock
from harness.records.trial_record import Validation
from harness.reference_checks.comparison import TrialError
from harness.runs import rank_trial
from harness.runs.rank_trial import Assignment, Outcome, TrialRun, run
from harness.strategies import optimizers
from harness.strategies.strategy import Sharded
from harness.suites.trial import Trial
from harness.witness import optimizer_witness
from harness.witness.batch_witness import BatchWitness
from harness.witness.training_checks import TrainingChecks
from harness.workloads import trial_dataset
from harness.workloads.dataset import Dataset, Pair
from harness.workloads.models import GPT
from harness.workloads.rank_batches import RankBatches
from impl import ops
from impl.codecs.codec import Codec, parse
from impl.comm.watchdog import Watchdog
from impl.engine import muon
from impl.engine.masters import Stepped
from impl.engine.muon import Muon
from impl.policy.policy import Policy
from impl.policy.topology import Topology
from impl.unit.outer_step import OuterStep
from impl.unit.unit import Unit
from impl.zero import Zero
from tests.harness.cluster.test_rank_processes import local
from tests.harness.runs.test_rank_trial import assembled, text, trial
from tests.support.params import long

__all__ = ["text"]  # a fixture

Patch = contextlib.AbstractContextManager[Any]
Sabotage = Callable[[Rank], Patch]


def instead_of(owner: type, name: str) -> Callable[[Callable[..., Any]], Sabotage]:
    """Make a patch of a method from a function, which gets the object, the method and the rank."""
    plain = getattr(owner, name)
    return lambda change: lambda rank: mock.patch.object(owner, name, partialmethod(change, plain, rank))


def both(*sabotages: Sabotage) -> Sabotage:
    """Make several patches at once."""

    @contextlib.contextmanager
    def all_of(rank: Rank) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for sabotage in sabotages:
                stack.enter_context(sabotage(rank))
            yield

    return all_of


# Local steps


@instead_of(OuterStep, "take")
def forgotten_momentum(outer: OuterStep, taken: Any, _: Rank) -> None:
    """Outer steps forget the momentum of the steps before."""
    if outer._speed is not None:
        outer._speed.zero_()
    taken(outer)


@instead_of(OuterStep, "take")
def a_group_apart(outer: OuterStep, taken: Any, rank: Rank) -> None:
    """The ranks of the last node keep masters of their own after an outer step."""
    taken(outer)
    if rank.node:
        with torch.no_grad():
            outer._master_shard.master.mul_(1 + 2**-20)


# Data


@instead_of(Dataset, "batch")
def shared_batches(data: Dataset, drawn: Any, _: Rank, **place: int) -> Pair:
    """All ranks read what rank 0 reads."""
    return drawn(data, **{**place, "rank": 0})


@instead_of(BatchWitness, "batches")
def shared_witness(witness: BatchWitness, drawn: Any, _: Rank, step: int, ranks: Any) -> Any:
    """The check draws the batches of rank 0 for all ranks."""
    return drawn(witness, step, [0 for _ in ranks])


@instead_of(RankBatches, "step")
def half_batches(data: RankBatches, drawn: Any, _: Rank, index: int) -> Iterator[list[Any]]:
    """A step reads the first half of each batch."""
    for micro in drawn(data, index):
        yield [(inputs[: len(inputs) // 2], targets[: len(targets) // 2]) for inputs, targets in micro]


@instead_of(GPT, "forward")
def half_in_the_model(model: GPT, passed: Any, _: Rank, tokens: Tensor, targets: Tensor) -> Any:
    """In training mode the model computes with the first half of each batch that it is given."""
    half = len(tokens) // 2 if model.training and len(tokens) > 1 else len(tokens)
    return passed(model, tokens[:half], targets[:half])


@instead_of(Dataset, "batch")
def repeated_batches(data: Dataset, drawn: Any, _: Rank, **place: int) -> Pair:
    """Batches repeat every 7 steps."""
    return drawn(data, **{**place, "step": place["step"] % 7})


@instead_of(BatchWitness, "batches")
def repeated_witness(witness: BatchWitness, drawn: Any, _: Rank, step: int, ranks: Any) -> Any:
    """The check draws batches that repeat every 7 steps too."""
    return drawn(witness, step % 7, ranks)


@instead_of(Dataset, "validation_batches")
def validation_on_training(data: Dataset, drawn: Any, _: Rank, **counts: int) -> list[Pair]:
    """Validation samples are taken from the training split."""
    with mock.patch.object(data, "validation", data.train):
        return drawn(data, **counts)


def training_as_validation(_: Rank) -> Patch:
    """The data set has a copy of a part of its training text for validation, so that the check reads that too."""
    load = trial_dataset.load

    def loaded(of: Trial) -> Any:
        dataset = load(of)
        dataset.validation = dataset.train[: len(dataset.validation)].copy()
        return dataset

    return mock.patch.object(trial_dataset, "load", loaded)


# Seconds


@instead_of(StepClock, "end")
def no_waits_of_backward(clock: StepClock, end: Any, _: Rank, **fields: Any) -> None:
    """The time in which the backward pass waited for messages is left out of the step."""
    end(clock, **fields)
    step = clock.steps[-1]
    clock.steps[-1] = step.model_copy(update={"total": step.total - (step.exposed_backward or 0.0)})


@instead_of(TrainingChecks, "note_reduced")
def work_in_a_check(checks: TrainingChecks, noted: Any, _: Rank, *values: Any) -> None:
    """A wait is moved out of the step, into a check."""
    time.sleep(0.05)
    noted(checks, *values)


@instead_of(StepClock, "end")
def warm_up_counted(clock: StepClock, end: Any, _: Rank, **fields: Any) -> None:
    """Warm-up steps are on record as timed ones."""
    end(clock, **{**fields, "warmup": False})


@instead_of(Sharded, "backward")
def a_baseline_that_sleeps(strategy: Sharded, taken: Any, _: Rank, loss: Tensor) -> None:
    """Each backward pass sleeps for 50 ms."""
    time.sleep(0.05)
    taken(strategy, loss)


@instead_of(Sharded, "backward")
def a_baseline_that_computes(strategy: Sharded, taken: Any, _: Rank, loss: Tensor) -> None:
    """Each backward pass computes for 0.2 s of CPU time."""
    begin = time.thread_time()
    while time.thread_time() - begin < 0.2:
        pass
    taken(strategy, loss)


@instead_of(Watchdog, "wait")
def a_baseline_that_waits(dog: Watchdog, waited: Any, _: Rank, step: Any, receive: Any, **how: Any) -> Any:
    """Each wait for a message takes 0.1 s longer, and is on record."""
    return waited(dog, step, lambda: (time.sleep(0.1), receive())[1], **how)


# Optimizer


def all_but(kept: Callable[[Tensor], Tensor]) -> Sabotage:
    """The optimizer steps only the elements that ``kept`` selects; the others get their values back."""

    @instead_of(torch.optim.AdamW, "step")
    def partly(optimizer: torch.optim.AdamW, taken: Any, _: Rank, closure: None = None) -> Any:
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        before = [weight.detach().clone() for weight in weights]
        taken(optimizer, closure)
        with torch.no_grad():
            for weight, old in zip(weights, before, strict=True):
                stepped = kept(torch.arange(weight.numel())).view(weight.shape)
                weight.copy_(torch.where(stepped, weight, old))

    return partly


def watched(numbers: Tensor) -> Tensor:
    """Whether an element is one of those that are watched in every step."""
    return torch.isin(numbers, optimizer_witness._evenly(len(numbers)))


def lane(numbers: Tensor) -> Tensor:
    """Whether an element is stepped if one lane in 64 is left out, but for elements that are always watched."""
    return (numbers % 64 != 5) | watched(numbers)


@instead_of(Sharded, "step")
def quartered(strategy: Sharded, taken: Any, _: Rank, optimizer: Any, clip: float | None) -> Stepped:
    """Gradients are divided by 4 before the optimizer gets them, in repeats after the first."""
    strategy.zero.masters.scale_gradients(0.25)
    return taken(strategy, optimizer, clip)


@instead_of(Sharded, "step")
def not_clipped(strategy: Sharded, taken: Any, _: Rank, optimizer: Any, clip: float | None) -> Stepped:
    """Norms are computed, and gradients stay as they are."""
    return taken(strategy, optimizer, None if clip is None else 1e6)


def half_the_rate(_: Rank) -> Patch:
    """The learning rate is half of what the trial asks for."""
    build = optimizers.build

    def slower(setting: Any, parameters: Any, **how: Any) -> Any:
        arguments = {**setting.arguments, "lr": setting.arguments.get("lr", 1e-3) / 2}
        return build(setting.model_copy(update={"arguments": arguments}), parameters, **how)

    return mock.patch.object(optimizers, "build", slower)


@instead_of(Zero, "param_groups")
def a_frozen_unit(zero: Zero, groups: Any, _: Rank) -> Any:
    """The last weights have a learning rate of 0."""
    whole = groups(zero)
    last = {**whole[-1], "params": whole[-1]["params"][-1:], "lr": 0.0}
    return [*whole[:-1], {**whole[-1], "params": whole[-1]["params"][:-1]}, last]


@instead_of(torch.optim.AdamW, "step")
def lost_moments(optimizer: torch.optim.AdamW, taken: Any, _: Rank, closure: None = None) -> Any:
    """AdamW's moments are lost before each step, but for elements that are always watched."""
    for state in optimizer.state.values():
        moments = state["exp_avg"].view(-1)
        moments[~watched(torch.arange(len(moments)))] = 0
    return taken(optimizer, closure)


def each_micro_batch(rank: Rank) -> Patch:
    """Muon orthogonalises every micro-batch by itself; AdamW still steps once."""
    held: list[Any] = []

    @instead_of(Sharded, "make_optimizer")
    def remembered(strategy: Sharded, made: Any, _: Rank, setting: Any) -> Any:
        held.append(made(strategy, setting))
        return held[-1]

    @instead_of(Sharded, "backward")
    def stepping(strategy: Sharded, passed: Any, _: Rank, loss: Tensor) -> None:
        passed(strategy, loss)
        if held and strategy.wire is not None and strategy.wire.observer is None:
            matrices = [group for group in held[-1].param_groups if group["matrices"]]
            with torch.no_grad():
                held[-1].step_matrices(matrices)
            for master in matrices[0]["params"]:
                master.grad.zero_()

    return both(remembered, stepping)(rank)


def not_orthogonal(_: Rank) -> Patch:
    """The owner of a matrix divides its momentum by the norm, and iterates no more."""
    return mock.patch.object(muon, "_zeropower_via_newtonschulz", lambda whole, *_: whole / whole.norm())


@instead_of(Muon, "step_matrices")
def lost_momentum(optimizer: Muon, taken: Any, _: Rank, groups: Any) -> None:
    """The momentum is lost in each step."""
    for master in groups[0]["params"]:
        for value in optimizer.state.get(master, {}).values():
            value.zero_()
    taken(optimizer, groups)


# Bytes


@instead_of(Policy, "secondary_ranks")
def copies_across_nodes(policy: Policy, ranks: Any, _: Rank, topology: Topology) -> int:
    """The copy of hpZ is shared by the ranks of all nodes, in the engine and in what is predicted."""
    return topology.world if ranks(policy, topology) else 0


def uncounted_inside(_: Rank) -> Patch:
    """Messages inside nodes are neither booked nor predicted."""
    counts = impl.plan.traffic.destinations

    def between(*place: Any, **how: Any) -> Any:
        return {link: count for link, count in counts(*place, **how).items() if link == "inter"}

    first = mock.patch.object(impl.plan.traffic, "destinations", between)
    return both(lambda _: first, lambda _: mock.patch.object(impl.comm.wire, "destinations", between))(_)


@instead_of(Sharded, "step")
def a_reset_counter(strategy: Sharded, taken: Any, _: Rank, *how: Any) -> Stepped:
    """The ledger begins anew at each step of the optimizer."""
    strategy.zero.wire.ledger.booked.clear()
    return taken(strategy, *how)


@instead_of(Policy, "reduce_axes")
def cast_gradients(policy: Policy, axes: Any, _: Rank, topology: Topology) -> Any:
    """Gradients are sent in bf16, though the policy names int4, in the engine and in what is predicted."""
    return tuple((axis, parse("bf16")) for axis, _ in axes(policy, topology))


@instead_of(Unit, "all_gather")
def exact_weights(unit: Unit, gathered: Any, _: Rank, *how: Any) -> None:
    """Each rank has the masters themselves as its gathered weights."""
    gathered(unit, *how)
    master = unit.master_shard.master.detach().contiguous()
    masters = [torch.empty_like(master) for _ in range(dist.get_world_size())]
    dist.all_gather(masters, master)
    for member, slot in zip(unit.members, unit.geometry.slots, strict=True):
        flat = member.parameter.data.view(-1)
        for rank in range(dist.get_world_size()):
            begin, end = unit.geometry.overlap(slot, rank)
            part = masters[rank][slice(*unit.geometry.part(slot, rank))]
            flat[begin - slot.offset : end - slot.offset] = part


@contextlib.contextmanager
def another_rounding(_: Rank) -> Iterator[None]:
    """Kernels encode 99 % of each value, once they have been compared with the reference."""
    encode, begun = ops.encode, False

    def smaller(codec: Codec, x: Tensor, out: Tensor, **how: Any) -> None:
        encode(codec, x * 0.99 if begun else x, out, **how)

    def begin(trial_run: TrialRun) -> Outcome:
        nonlocal begun
        begun = True
        return plain(trial_run)

    plain = TrialRun.run
    with mock.patch.object(ops, "encode", smaller), mock.patch.object(TrialRun, "run", begin):
        yield


# Losses


def better_validation(_: Rank) -> Patch:
    """One per cent less than the validation loss goes on record."""
    return mock.patch.object(
        rank_trial, "Validation", lambda **fields: Validation(**{**fields, "loss": 0.99 * fields["loss"]})
    )


def equal_seeds(_: Rank) -> Patch:
    """All ranks begin with the same random state."""
    plain = torch.manual_seed

    def seed(_: int) -> torch.Generator:
        return plain(0)

    return mock.patch.object(torch, "manual_seed", seed)


QUANTISED: Final = {"max_padding": 9.0, "gradients": "int4:64", "weights": "int8:64"}
PLAIN: Final = {"strategy": "zero3", "policy": {"max_padding": 9.0}}
LOCAL: Final = {
    "strategy": "mics",
    "policy": {"max_padding": 9.0, "gradients": "int8:64", "local_steps": 2},
}
MUON: Final = {
    **PLAIN, "accumulation": 2,
    "optimizer": {"name": "Muon", "arguments": {"lr": 0.02, "adamw": {"lr": 1e-3}}},
}  # fmt: skip
ONE_NODE: Final = {**PLAIN, "cluster": {"nodes": 1, "ranks_per_node": 4}}
Row = tuple[Sabotage, str, dict[str, Any]]
SABOTAGES: Final[dict[str, Row]] = {
    "ranks share data": (shared_batches, "in step 0 rank 1 read another batch", {}),
    "ranks share data, and the check": (
        both(shared_batches, shared_witness), "rank 1 read in step 0 the batch that rank 0 read", {}
    ),
    "half batches": (half_batches, "read 1 samples in step 0, not 2", {}),
    "half batches in the model": (
        half_in_the_model, "in step . rank 0 trained at a loss of .* but a single process", {"repeat": 2}
    ),
    "batches repeat": (repeated_batches, "in step 7 rank 0 read another batch", {}),
    "batches repeat, and the check": (
        both(repeated_batches, repeated_witness), "rank 0 read in step 7 a batch that it had read in an earlier", {}
    ),
    "validation on training": (
        validation_on_training, "validates on other samples than those held out", {"validate_every": 3}
    ),
    "validation on training, and the check": (
        training_as_validation, "validation samples are part of the training data", {"validate_every": 3}
    ),
    "a better validation": (
        better_validation, "the validation after step 3 has a loss of .* on record", {"validate_every": 3}
    ),
    "equal seeds": (equal_seeds, "rank 1 begins with the random state of rank 0", {}),
    "backward's waits are left out": (no_waits_of_backward, "the clock misses a part of it", {}),
    "a wait in a check": (work_in_a_check, "slept for .* s in checks", {}),
    "warm-up is timed": (warm_up_counted, "step 0 of rank 0 is on record as a timed step", {}),
    "a baseline that sleeps": (a_baseline_that_sleeps, "something else made it wait", PLAIN),
    "a baseline that computes": (a_baseline_that_computes, "computed for .* but the model alone", PLAIN),
    "a baseline that waits": (a_baseline_that_waits, "nothing explains", ONE_NODE),
    "one lane in 64": (all_but(lane), "of the drawn elements on rank", {}),
    "only watched elements": (all_but(watched), "of the drawn elements on rank", {}),
    "gradients / 4": (quartered, "had gradients with a norm of .* but its backward passes left", {}),
    "no clipping": (not_clipped, "after clipping the norm over all ranks from .* to 0.1", {"clip": 0.1}),
    "half the learning rate": (half_the_rate, "but the trial's AdamW gives", {}),
    "a frozen unit": (a_frozen_unit, "but the trial's AdamW gives", {}),
    "lost moments": (lost_moments, "exp_avg of drawn elements on rank", {}),
    "each micro-batch by itself": (  # weights change inside the step, so its loss is wrong too
        each_micro_batch, "trained at a loss of .* but a single|changed weights or momentum of matrix", MUON
    ),
    "not orthogonal": (not_orthogonal, "after step . element .* of matrix .* but Muon gives", MUON),
    "lost momentum": (lost_momentum, "the momentum of matrix .* is not what Muon gives", MUON),
    "hpZ across nodes": (
        copies_across_nodes, "bytes of weights to other nodes in backward", {**PLAIN, "strategy": "hpz"}
    ),
    "uncounted inside nodes": (uncounted_inside, "the transports carried", PLAIN),
    "a reset counter": (a_reset_counter, "predicted are", PLAIN),
    "bf16 named int4": (cast_gradients, "gradients of .* were sent as bf16", {}),
    "exact weights": (exact_weights, "the weights of .* were gathered with a squared error of 0", {}),
    "forgotten momentum": (forgotten_momentum, "was the momentum forgotten", LOCAL),
    "a group apart": (a_group_apart, "hold different weights, but groups must agree", LOCAL),
    "another rounding": (another_rounding, "are not what the reference of ", {}),
}  # fmt: skip
"""A patch, the message that names it, and changes of the trial."""
REPRESENTATIVE: Final = ("one lane in 64", "uncounted inside nodes", "backward's waits are left out")
# Sabotages that nobody sees without one check: the patch that switches it off.
OFF: Final[dict[str, Callable[[], Patch]]] = {
    "one lane in 64": lambda: mock.patch.object(optimizer_witness, "_DRAWN_TENSORS", 0),
    "only watched elements": lambda: mock.patch.object(optimizer_witness, "_DRAWN_TENSORS", 0),
}


def of(name: str, text: str) -> Trial:
    """The trial that a sabotage spoils: repeat 1 of 2 + 7 steps."""
    changes = {"strategy": "zeropp", "policy": QUANTISED, "seed": 1, "repeat": 1, "steps": 7}
    changes |= SABOTAGES[name][2]
    return trial(text, changes.pop("strategy"), **changes)


def _run_all(rank: Rank, trials: list[tuple[str, Trial, bool]]) -> list[Outcome]:
    """The trials one after the other, each with its sabotage, and with or without the check."""
    outcomes = []
    for name, sabotaged, checks in trials:
        off = contextlib.nullcontext() if checks else OFF[name]()
        with SABOTAGES[name][0](rank), off:
            outcomes.append(run(rank, Assignment(sabotaged, None)))
    return outcomes


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, text: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, bool], tuple[list[Outcome], Trial]]:
    """The ranks' outcomes under the sabotages of selected tests, by name and whether checks are on."""
    tests = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    wanted = {(test.params["name"], test.params["checks"]) for test in tests if test is not None}
    found = {}
    for one_node in (False, True):
        trials = [(name, of(name, text), checks) for name, checks in sorted(wanted)]
        trials = [row for row in trials if (row[1].cluster.nodes == 1) == one_node]
        if trials:
            log = tmp_path_factory.mktemp("ranks") / "log"
            launch = local(trials[0][1].topology(), log, seconds=280)
            by_trial = zip(*run_ranks(_run_all, trials, launch), strict=True)
            for (name, own, checks), ranks in zip(trials, by_trial, strict=True):
                found[name, checks] = [*ranks], own
    return found


@pytest.mark.parametrize("checks", [True])
@pytest.mark.parametrize(
    "name", [*REPRESENTATIVE, *long(*(name for name in SABOTAGES if name not in REPRESENTATIVE))]
)
def test_each_sabotage_of_a_repeat_is_named(
    name: str, checks: bool, outcomes: dict[tuple[str, bool], tuple[list[Outcome], Trial]]
) -> None:
    """A repeat with a sabotage fails, and the message names what is wrong and where."""
    with pytest.raises(TrialError, match=SABOTAGES[name][1]):
        assembled(*outcomes[name, checks])


@pytest.mark.long
@pytest.mark.parametrize("checks", [False])
@pytest.mark.parametrize("name", OFF)
def test_nothing_else_sees_a_sabotage_of_single_elements(
    name: str, checks: bool, outcomes: dict[tuple[str, bool], tuple[list[Outcome], Trial]]
) -> None:
    """Without elements that are drawn anew, the same repeat passes every other check."""
    assert assembled(*outcomes[name, checks]).failure is None
