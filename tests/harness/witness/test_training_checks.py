"""Each way to train wrongly after the first step fails the trial with a message that names it; nothing else does."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from harness.cluster.rank import Rank
from harness.cluster.rank_processes import run_ranks
from harness.measure import communication_error
from harness.measure.communication_error import BF16_VNMSE, GROWTH, growth, refusal
from harness.measure.step_clock import StepClock
from harness.records.trial_record import CommunicationError
from harness.reference_checks.comparison import TrialError
from harness.runs.rank_trial import Assignment, Outcome, run
from harness.strategies.strategy import Sharded
from harness.suites.trial import Trial
from harness.witness.training_checks import wrong_kernel
from harness.workloads.dataset import Dataset, Pair
from harness.workloads.rank_batches import RankBatches
from impl import ops
from impl.codecs.codec import FORMATS, parse
from impl.comm import exchanges
from impl.comm.watchdog import Watchdog
from impl.engine.engine import Zero
from impl.engine.masters import Stepped
from impl.policy.policy import Feedback, Policy
from impl.policy.topology import Topology
from impl.unit.gradient_reduction import GradientReduction
from impl.unit.secondary_shard import SecondaryShard
from tests.harness.cluster.test_rank_processes import local
from tests.harness.runs.test_rank_trial import assembled, text, trial
from tests.support.params import long

__all__ = ["text"]  # a fixture

# Sabotages: patches of one name, made on every rank before it trains

Patch = contextlib.AbstractContextManager[Any]


def instead_of(owner: type, name: str) -> Callable[[Callable[..., Any]], Callable[[Rank], Patch]]:
    """Make a patch of a method from a function, which gets the object, the method and the rank."""
    plain = getattr(owner, name)
    return lambda change: lambda rank: mock.patch.object(owner, name, partialmethod(change, plain, rank))


@instead_of(RankBatches, "step")
def other_batches(data: RankBatches, drawn: Any, rank: Rank, index: int) -> Iterator[list[Any]]:
    """Rank 1 reads what rank 0 reads."""
    return iter([list(data.of_rank(index, 0))]) if rank.rank == 1 else drawn(data, index)


_steps = Counter[int]()


@instead_of(torch.optim.AdamW, "step")
def half_the_steps(optimizer: torch.optim.AdamW, taken: Any, _: Rank, closure: None = None) -> Any:
    """Every second step is left out."""
    _steps[id(optimizer)] += 1
    return None if _steps[id(optimizer)] % 2 == 0 else taken(optimizer, closure)


@instead_of(Zero, "grad_norm")
def local_norms(zero: Zero, whole: Any, rank: Rank, kind: float = 2.0) -> Any:
    """Every rank clips by the norm of its own shards."""
    return whole(zero, kind) * (1 + 0.01 * rank.rank)


_reductions = Counter[int]()


@instead_of(GradientReduction, "_take")
def quartered(reduction: GradientReduction, taken: Any, _: Rank, mean: Tensor) -> None:
    """Each unit's mean is divided by 4 from its fifth reduction on."""
    _reductions[id(reduction)] += 1
    taken(reduction, mean / 4 if _reductions[id(reduction)] > 4 else mean)


@instead_of(SecondaryShard, "keep")
def stale_secondary(
    copy: SecondaryShard, renewed: Any, _: Rank, received: Tensor, version: Any, *, step: int = 0
) -> None:
    """Backward computes with the first copy that was kept."""
    if copy._frames is None:
        renewed(copy, received, version, step=step)
    copy._version = version


@instead_of(StepClock, "end")
def stops_early(clock: StepClock, end: Any, _: Rank, **fields: Any) -> None:
    """The clock stops before a wait of a tenth of a second."""
    end(clock, **fields)
    time.sleep(0.1)


@instead_of(StepClock, "end")
def better_loss(clock: StepClock, end: Any, _: Rank, *, loss: float, **fields: Any) -> None:
    """One per cent less than the loss goes on record from the third step on."""
    end(clock, loss=loss * (0.99 if fields["index"] > 1 else 1), **fields)


@instead_of(StepClock, "end")
def halves_steps(clock: StepClock, end: Any, _: Rank, **fields: Any) -> None:
    """Every second step is on record with half its time, and the next one with that half."""
    end(clock, **fields)
    total = clock.steps[-1].total * (0.5 if fields["index"] % 2 else 1.5)
    clock.steps[-1] = clock.steps[-1].model_copy(update={"total": total})


@instead_of(StepClock, "end")
def three_quarters(clock: StepClock, end: Any, _: Rank, **fields: Any) -> None:
    """Every step, made longer by a tenth of a second, is on record with three quarters of its time."""
    time.sleep(0.1)
    end(clock, **fields)
    clock.steps[-1] = clock.steps[-1].model_copy(update={"total": 0.75 * clock.steps[-1].total})


def biased_kernel(_: Rank) -> Patch:
    """The kernels read a little more than was written."""
    decode = ops.decode

    def biased(codec: Any, frames: Tensor, out: Tensor) -> None:
        decode(codec, frames, out)
        out.mul_(1 + 1e-3)

    return mock.patch.object(ops, "decode", biased)


@instead_of(Policy, "reduce_axes")
def another_codec(policy: Policy, axes: Any, _: Rank, topology: Topology) -> Any:
    """Gradients travel with another rule of scales, in equally many bytes."""
    return tuple((axis, parse("int4:64:clip")) for axis, _ in axes(policy, topology))


_passes = Counter[str]()


@instead_of(Sharded, "backward")
def half_a_loss(strategy: Sharded, taken: Any, _: Rank, loss: Tensor) -> None:
    """Half of the loss is differentiated from the third pass on: what is reduced is what was computed."""
    _passes["backward"] += 1
    taken(strategy, loss / 2 if _passes["backward"] > 3 else loss)


@instead_of(Sharded, "step")
def no_clipping(strategy: Sharded, taken: Any, _: Rank, optimizer: Any, clip: float | None) -> Stepped:
    """Norms are computed, and gradients stay as they are."""
    return taken(strategy, optimizer, None if clip is None else 1e6)


_before = dict[int, list[Tensor]]()


@instead_of(torch.optim.AdamW, "step")
def a_late_update(optimizer: torch.optim.AdamW, taken: Any, _: Rank, closure: None = None) -> Any:
    """The optimizer steps by the gradients of the step before."""
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
    now = [gradient.clone() for gradient in gradients]
    for gradient, old in zip(gradients, _before.get(id(optimizer), now), strict=True):
        gradient.copy_(old)
    _before[id(optimizer)] = now
    return taken(optimizer, closure)


@instead_of(RankBatches, "_batch")
def batches_without_a_step(data: RankBatches, drawn: Any, _: Rank, step: int, *place: int) -> Any:
    """Every step draws what the first one draws, on all ranks and in what is drawn to compare."""
    return drawn(data, 0, *place)


@instead_of(RankBatches, "_batch")
def batches_that_repeat(data: RankBatches, drawn: Any, _: Rank, step: int, *place: int) -> Any:
    """Batches repeat every three steps, on all ranks and in what is drawn to compare."""
    return drawn(data, step % 3, *place)


@instead_of(RankBatches, "_batch")
def half_batches(data: RankBatches, drawn: Any, _: Rank, *place: int) -> Any:
    """A rank reads the first half of each of its batches, also in what is drawn to compare."""
    return tuple(tensor[: len(tensor) // 2] for tensor in drawn(data, *place))


@instead_of(Dataset, "validation_batches")
def validation_on_training(data: Dataset, drawn: Any, _: Rank, **counts: int) -> list[Pair]:
    """Validation samples are taken from the training split."""
    with mock.patch.object(data, "validation", data.train):
        return drawn(data, **counts)


@contextlib.contextmanager
def little_waiting(_: Rank) -> Iterator[None]:
    """Waits take 20 ms longer, and a tenth of each goes on record."""
    wait = Watchdog.wait

    def waited(self: Watchdog, message: Any, receive: Any, **options: Any) -> Any:
        return wait(self, message, lambda: (time.sleep(0.02), receive())[1], **options)

    def marked(self: Watchdog) -> Callable[[], float]:
        seconds = self._waited / 10
        return lambda: seconds

    counted = property(lambda self: self._waited / 10)
    with mock.patch.multiple(Watchdog, wait=waited, exposed_seconds=counted, mark_exposed=marked):
        yield


@instead_of(GradientReduction, "_take")
def quartered_late(reduction: GradientReduction, taken: Any, _: Rank, mean: Tensor) -> None:
    """Each unit's mean is divided by 4 in the steps after step 6."""
    _reductions[id(reduction)] += 1
    taken(reduction, mean / 4 if _reductions[id(reduction)] > 7 else mean)


_in_steps = Counter[int]()


@instead_of(GradientReduction, "_take")
def quartered_in_steps(reduction: GradientReduction, taken: Any, _: Rank, mean: Tensor) -> None:
    """Each unit's mean is divided by 4 in the steps after step 6, and never in a rehearsal."""
    _in_steps[id(reduction)] += reduction._wire.observer is None
    late = _in_steps[id(reduction)] > 7 and reduction._wire.observer is None
    taken(reduction, mean / 4 if late else mean)


def quartered_unit(number: int) -> Callable[[Rank], Patch]:
    """The mean of the unit with this number is divided by 4, from the first step on."""
    units = list[int]()  # in the order in which they were first reduced

    @instead_of(GradientReduction, "_take")
    def quartered_there(reduction: GradientReduction, taken: Any, _: Rank, mean: Tensor) -> None:
        if id(reduction) not in units:
            units.append(id(reduction))
        taken(reduction, mean / 4 if units.index(id(reduction)) == number else mean)

    return quartered_there


_means = dict[int, list[Tensor]]()


@instead_of(GradientReduction, "_take")
def a_mean_one_step_late(reduction: GradientReduction, taken: Any, _: Rank, mean: Tensor) -> None:
    """From the third reduction on, a unit gets the mean of its reduction before."""
    means = _means.setdefault(id(reduction), [])
    means.append(mean.clone())
    taken(reduction, means[-2] if len(means) > 2 else mean)


@contextlib.contextmanager
def ignored_nodes(_: Rank) -> Iterator[None]:
    """From step 3 on, reductions use a rank's own message in place of those of other nodes."""
    send, end, late = exchanges.point_to_point, StepClock.end, False

    def own(group: Any, kind: Any, received: Tensor, sent: Tensor, tag: int) -> Any:
        works = send(group, kind, received, sent, tag)
        if not late or kind != "all_to_all" or group.same_node:
            return works
        for work in works:
            work.wait()
        parts = received.view(group.size, -1)
        parts[:] = parts[group.index].clone()
        return []

    def ended(clock: StepClock, **fields: Any) -> None:
        nonlocal late
        late = fields["index"] >= 2
        end(clock, **fields)

    with mock.patch.object(exchanges, "point_to_point", own), mock.patch.object(StepClock, "end", ended):
        yield


LATER: Final[dict[str, tuple[Callable[[Rank], Patch], str]]] = {
    "gradients divided by 4 after step 6": (quartered_late, "in step [78] rank .'s reduced gradient of"),
    "gradients divided by 4 in steps alone": (
        quartered_in_steps,
        "in step [78] rank .'s reduced gradient of",
    ),
    "a stale copy in a repeat": (
        stale_secondary,
        "secondary of .* but the vNMSE of the copied weights is",
    ),
    "a late update in a repeat": (a_late_update, "had other gradients than its backward passes left"),
    "a mean one step late": (a_mean_one_step_late, "in step [78] rank .'s reduced gradient of"),
    "ignored nodes": (ignored_nodes, "in step [78] rank .'s reduced gradient of"),
    **{
        f"gradients of unit {number} divided by 4": (
            quartered_unit(number),
            "in step [78] rank .'s reduced gradient of",
        )
        for number in range(3)
    },
    "a better loss in a repeat": (
        better_loss,
        "in step [78] rank . trained at a loss of .* but a single process",
    ),
}
"""Sabotages of a repeat that measures no errors; before a drawn step, it is compared with a single process."""
SABOTAGES: Final[dict[str, tuple[Callable[[Rank], Patch], str]]] = {
    "a rank reads another rank's batches": (other_batches, "in step 0 rank 1 read another batch"),
    "every second step skipped": (half_the_steps, "after step . element .* but the trial's AdamW gives"),
    "clipping by local norms": (local_norms, "gradient norms of step 0 differ between ranks"),
    "gradients divided by 4": (quartered, "the vNMSE of gradients of .* is"),
    "a stale copy": (stale_secondary, "secondary of .* but the vNMSE of the copied weights is"),
    "a clock that stops early": (stops_early, "the clock misses a part"),
    "steps of three quarters": (three_quarters, "the clock misses a part"),
    "another codec of equal bytes": (another_codec, "gradients of .* were sent as int4:64:clip in hop"),
    "half a loss": (half_a_loss, "in step 2 rank .'s reduced gradient of unit"),
    "a better loss on record": (better_loss, "in step 2 rank . trained at a loss of"),
    "no clipping": (
        no_clipping,
        "had gradients with a norm of .* after clipping the norm over all ranks from .* to 0.1",
    ),
    "a late update": (
        a_late_update,
        "in step . the optimizer of rank . had other gradients than its backward passes left",
    ),
    "batches without a step": (
        batches_without_a_step,
        "in step 1 rank . read another batch",
    ),
    "batches that repeat": (batches_that_repeat, "in step 3 rank . read another batch"),
    "half batches": (half_batches, "read 1 samples in step 0, not 2"),
    "validation on training": (validation_on_training, "validates on other samples than those held out"),
    "little waiting": (
        little_waiting,
        "recorded that it waited .* but its thread slept for|but waited for messages for",
    ),
    "halved steps": (halves_steps, "but a second clock around it shows"),
    "a biased kernel": (biased_kernel, "kernels of int8:64 do not equal the reference"),
}
SEED: Final = 1  # with it, repeat 1 of a trial of 2 + 7 steps draws one of the last two
REPEAT: Final[dict[str, Any]] = {"repeat": 1, "seed": SEED, "steps": 7}
REPRESENTATIVE: Final = "every second step skipped"
CLEAN: Final[dict[str, dict[str, Any]]] = {
    "zero3": {"accumulation": 2},
    "zeropp": {"clip": 1.0, "policy": {"max_padding": 9.0, "gradients": "int4:64", "offload_optimizer": 0.5}},
    "qgz": {"policy": {"max_padding": 9.0, "gradients": "int4:64:stochastic", "feedback": "loco"}},
    "zero1": {"policy": {"max_padding": 9.0, "compute": "fp16", "loss_scale": "dynamic:from1024"}},
    "ddp+qgz": {"policy": {"max_padding": 9.0}, "optimizer": {"schedule": {"warmup": 2}}},
    "ddp": {},
}


def _run_all(rank: Rank, trials: list[tuple[str, Trial]]) -> list[Outcome]:
    """The trials one after the other, each with its sabotage."""
    outcomes = []
    for name, sabotaged in trials:
        sabotages = SABOTAGES | LATER
        with sabotages[name][0](rank) if name in sabotages else contextlib.nullcontext():
            outcomes.append(run(rank, Assignment(sabotaged, None)))
    return outcomes


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, text: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[list[Outcome], Trial]]:
    """The ranks' outcomes under the sabotages of selected tests, and in trials without one, by name."""
    tests = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    wanted = {test.params.get("name") for test in tests if test is not None}
    policy = {"max_padding": 9.0, "gradients": "int4:64", "weights": "int8:64"}
    changes = {"clip": 0.1, "policy": policy, "validate_every": 3, "validation_batches": 1}
    make = partial(trial, text, measure_quantisation=True)
    trials = [(name, make("zeropp", **changes)) for name in SABOTAGES if name in wanted]
    repeat = {**REPEAT, "policy": policy}
    trials += [(name, trial(text, "zeropp", **repeat)) for name in LATER if name in wanted]
    trials += [(name, make(name, **CLEAN[name])) for name in CLEAN if name in wanted]
    launch = local(trials[0][1].topology(), tmp_path_factory.mktemp("ranks") / "log", seconds=280)
    by_trial = zip(*run_ranks(_run_all, trials, launch), strict=True)
    return {name: ([*ranks], trial) for (name, trial), ranks in zip(trials, by_trial, strict=True)}


@pytest.mark.parametrize(
    "name", [REPRESENTATIVE, *long(*(name for name in SABOTAGES if name != REPRESENTATIVE))]
)
def test_each_sabotage_is_named(name: str, outcomes: dict[str, tuple[list[Outcome], Trial]]) -> None:
    """A trial with a sabotage fails, and the message names what is wrong and where."""
    with pytest.raises(TrialError, match=SABOTAGES[name][1]):
        assembled(*outcomes[name])


@pytest.mark.parametrize(
    "name", ["ignored nodes", *long(*(name for name in LATER if name != "ignored nodes"))]
)
def test_each_sabotage_of_a_repeat_is_named(
    name: str, outcomes: dict[str, tuple[list[Outcome], Trial]]
) -> None:
    """A repeat that measures no errors fails too if its later steps are not what they should be."""
    with pytest.raises(TrialError, match=LATER[name][1]):
        assembled(*outcomes[name])


# What the check of a drawn step computes, with stochastic codecs and with differences.
DRAWN: Final = (
    {f"drawn step: {what}" for what in ("weights", "copies across nodes", "single process", "messages")},
    {f"drawn step: {what}" for what in ("weights", "copies across nodes")},
)


def _twice(rank: Rank, trials: list[Trial]) -> list[tuple[Outcome, Outcome]]:
    """Each trial with and without the check of a drawn step."""
    pairs = []
    for checked in trials:
        with mock.patch.object(communication_error, "drawn_step", return_value=None):
            plain = run(rank, Assignment(checked, None))
        pairs.append((run(rank, Assignment(checked, None)), plain))
    return pairs


def test_the_check_of_a_drawn_step_leaves_training_as_it_is(text: str, tmp_path: Path) -> None:
    """With and without the check, losses, norms, validations, ledgers and predictions are equal to the bit; the seconds
    of the check go on record.
    """
    stochastic = {"max_padding": 9.0, "gradients": "int4:64:stochastic", "feedback": "loco"}
    copied = {"max_padding": 9.0, "differences": "int4:64", "secondary_format": "bf16"}
    common = {"repeat": 2, "clip": 1.0, "validate_every": 2, "accumulation": 2}
    trials = [trial(text, "zeropp", policy=policy, **common) for policy in (stochastic, copied)]
    launch = local(trials[0].topology(), tmp_path / "log", seconds=280)
    for number, ranks in enumerate(zip(*run_ranks(_twice, trials, launch), strict=True)):
        records = [assembled([*side], trials[number]) for side in zip(*ranks, strict=True)]
        seen = [
            [[[(step.loss, step.gradient_norm) for step in rank.steps], rank.ledger] for rank in record.ranks]
            + [[(v.step, v.loss, v.inter_bytes) for v in record.validations], record.predicted]
            for record in records
        ]
        assert seen[0] == seen[1]
        assert all((record.check_seconds or 0) > 0 for record in records)
        costs = [record.check_cpu_seconds for record in records]
        assert costs[0].keys() - costs[1].keys() == DRAWN[number]
        assert {"before training", "kernels", "batches", "optimizer", "norms"} < costs[1].keys()


@given(seed=st.integers(0, 10**6), warmup=st.integers(0, 5), steps=st.integers(1, 40))
def test_a_drawn_step_is_late_and_not_a_warm_up(seed: int, warmup: int, steps: int) -> None:
    """It is in the second half, after warm-up, and never the first step."""
    total = warmup + steps
    drawn = communication_error.drawn_step(seed, 0, warmup, total)
    assert (drawn is None) == (total == 1)
    assert drawn is None or max(1, warmup, total // 2) <= drawn < total


@pytest.mark.parametrize("name", ["zeropp", *long(*(name for name in CLEAN if name != "zeropp"))])
def test_no_check_fires_on_a_clean_trial(name: str, outcomes: dict[str, tuple[list[Outcome], Trial]]) -> None:
    """Policies, hosts and peers pass all checks, and every step of a plain AdamW is computed again."""
    record = assembled(*outcomes[name])
    assert [rank.steps for rank in record.ranks]
    for outcome in outcomes[name][0]:
        assert outcome.checked.wrong is None
        assert outcome.checked.replayed >= 4 if name != "zero1" else True
        assert outcome.checked.linked == (0 if name in ("qgz", "ddp", "ddp+qgz") else 2)
        assert set(outcome.checked.batches) == {0, 1, 2, 3, 4}


def _error(step: int, purpose: str, error: float) -> CommunicationError:
    return CommunicationError(
        step=step, purpose=purpose, unit="u", hop=None, axis="", codec="int8:64", repeated=1,
        squared_error=error, squared_value=1.0,
    )  # fmt: skip


@given(first=st.floats(0, 1), factor=st.floats(0, 100), carried=st.booleans(), ranks=st.integers(1, 256))
@example(first=1e-6, factor=20.0, carried=False, ranks=4)
@example(first=0.00335, factor=8.75, carried=False, ranks=4)
@example(
    first=0.00335, factor=8.75, carried=False, ranks=128
)  # qgZ in 4 bits on 16x8 ranks of 16 tokens each
def test_an_error_that_grows_is_refused(first: float, factor: float, carried: bool, ranks: int) -> None:
    """An error that has grown by more than the factor for so many ranks is refused, except with error feedback or below
    a cast's error; up to 16 ranks the factor is GROWTH.
    """
    later = first * factor
    policy = Policy(feedback=Feedback() if carried else None)
    wrong = refusal([_error(0, "gradients", first), _error(9, "gradients", later)], policy, ranks)
    assert (wrong is None) == (carried or later <= growth(ranks) * max(first, BF16_VNMSE))
    assert growth(min(ranks, 16)) == GROWTH


@given(st.floats(1e-6, 1), st.floats(0, 2))
@example(6.29e-5, 6.37 / 6.29)  # DeepSpeed's, which rounds what was decoded to bf16
def test_a_copy_may_err_by_its_own_rounding_alone(error: float, factor: float) -> None:
    """A copy (hpZ) in 16 bits may add the error of its cast to that of the weights; a copy kept as frames may not."""
    errors = [_error(0, "weights", error), _error(0, "secondary", factor * error)]
    for kept, rounding in (("frames", 0.0), ("bf16", BF16_VNMSE)):
        policy = Policy(weights=parse("int8:64"), secondary="node", secondary_format=kept)  # type: ignore[arg-type]
        most = (math.sqrt(1.001 * error) + math.sqrt(rounding)) ** 2  # norms of errors add up at most
        assert (refusal(errors, policy, 4) is None) == (factor * error <= most)


@pytest.mark.parametrize(
    "codec", ["int8:256", "int3:64:asym", "fp8e4m3:128", "mxfp4:stochastic", "bf16", *FORMATS]
)
def test_kernels_are_the_reference(codec: str) -> None:
    """Compiled kernels pass, those of published formats too; a kernel with a small deviation is named."""
    assert wrong_kernel([parse(codec)], torch.device("cpu")) is None
    with biased_kernel(None):  # type: ignore[arg-type]
        wrong = wrong_kernel([parse(codec)], torch.device("cpu"))
    assert (wrong is None) == (codec == "bf16")
