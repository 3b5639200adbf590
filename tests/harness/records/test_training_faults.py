"""What ranks noted while they trained is compared with their records, and with each other."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from docs.numbers import REFERENCE, ROOT
from harness.records.training_faults import (
    Checked,
    Norms,
    Spent,
    _wrong_batches,
    computed,
    slowed,
    training_fault,
)
from harness.records.trial_record import Alone, LedgerRow, Record
from harness.suites.trial import Trial
from impl.codecs.codec import Raw
from tests.report.records import committed, record_of


def clean(count: int = 3, /, **changes: Any) -> tuple[list[Checked], Record]:
    """Return what ranks note in a trial without a fault, and its record, whose steps take 0.4 s."""
    record = record_of(Trial(strategy="zeropp", steps=count, warmup=0))
    timed = [
        step.model_copy(update={"total": 0.4, "exposed_forward": None, "loss": 2.0})
        for step in record.ranks[0].steps
    ]
    ranks = [rank.model_copy(update={"steps": timed}) for rank in record.ranks]
    noted = Checked(
        losses=[2.0] * count,
        timed=count,
        elements=10,
        trainable=10 * len(ranks),
        norms={step: Norms(1.0, 1.0, 1.0) for step in range(count)},
        steps=[Spent(0.4, 0.3, 0.1)] * count,
        laps=0.4 * count,
        passed=(0.4 * count, 0.4 * count),
    )
    return [replace(noted, **changes) for _ in ranks], record.model_copy(update={"ranks": ranks})


def fault(checked: list[Checked], record: Record) -> str | None:
    return training_fault(checked, record.ranks)


def test_a_trial_without_a_fault_passes() -> None:
    """What a clean trial notes is no fault."""
    assert fault(*clean()) is None


@given(ran=st.floats(0, 1), slept=st.floats(0, 1), waited=st.floats(0, 100), steps=st.integers(1, 9))
@example(ran=0.0, slept=0.0, waited=100.0, steps=3)
@example(ran=0.0, slept=0.06, waited=0.0, steps=3)
def test_work_between_steps_is_judged_by_what_a_rank_did(
    ran: float, slept: float, waited: float, steps: int
) -> None:
    """Outside of steps of 0.4 s a rank may run and sleep for 3 % of them and 5 ms each, and wait for a CPU at will."""
    wrong = fault(*clean(steps, between=Spent(ran + slept + waited, ran, slept, waited)))
    assert (wrong is not None) == (ran + slept > 0.03 * 0.4 * steps + 0.005 * steps)
    assert wrong is None or "the clock misses a part of the steps" in wrong


@given(delays=st.lists(st.floats(0, 10), min_size=2, max_size=2))
def test_a_thread_without_a_cpu_between_two_clocks_is_no_fault(delays: list[float]) -> None:
    """A thread may lose its CPU between the readings of two clocks for any time, also with a single rank."""
    assert fault(*clean(passed=(1.2 - min(sum(delays), 1.2), 1.2 + sum(delays)))) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": [Spent(0.5, 0.3, 0.1)] * 3}, "the clock misses a part of it"),
        ({"steps": [Spent(0.3, 0.3, 0.0)] * 3}, "the clock counts too much"),
        ({"checks": Spent(0.1, 0.0, 0.1), "sleeps_counted": True}, "slept for 0.100 s in checks"),
        ({"passed": (1.5, 1.6)}, "but another clock shows 1.600 s"),
        ({"passed": (0.8, 0.9)}, "but another clock shows 0.900 s"),
        ({"timed": 4}, "rank 0 has 3 steps on record, not the steps 0 to 3"),
        ({"warmup": 1, "timed": 2}, "step 0 of rank 0 is on record as a timed step"),
        ({"losses": [2.0, 2.0, 1.9]}, "in step 2 rank 0 trained at a loss of 1.900000, but 2.000000 is on record"),
        ({"elements": 9}, "step 36 elements together, but the model has 40"),
        ({"norms": {0: Norms(1.0, 0.25, 1.0)}}, "a norm of 0.25, but its backward passes left 1"),
        ({"norms": {0: Norms(8.0, 8.0, 8.0)}}, "a norm of 8, but its backward passes left 1"),
        ({"clip": 0.5}, "but its backward passes left 0.25, after clipping the norm over all ranks from 2 to 0.5"),
        ({"batches": {0: "a"}, "of_next_rank": {0: "b"}}, "in step 0 rank 0 read another batch"),
        ({"batches": {0: "a"}, "of_next_rank": {0: "a"}, "distinct": True}, "rank 1 read in step 0 the batch that"),
        ({"carried": 8, "booked": 7}, "carried 8 bytes for rank 0 in the timed steps, but its ledger has 7"),
        ({"random": "a"}, "rank 1 begins with the random state of rank 0"),
        ({"sleeps_counted": True, "waited": 0.1}, "something else made it wait"),
    ],
)  # fmt: skip
def test_each_fault_is_named(changes: dict[str, Any], message: str) -> None:
    """Each fact that does not fit the record, or the other ranks, is named with its numbers."""
    assert message in (fault(*clean(**changes)) or "")


def test_a_batch_that_a_rank_reads_again_is_one_fault() -> None:
    """A rank that reads its own batch again reads no batch of another rank."""
    checked, _ = clean(batches={})
    checked[1] = replace(checked[1], batches={0: "a", 2: "a"}, distinct=True)
    checked[0] = replace(checked[0], of_next_rank={0: "a", 2: "a"})
    assert list(_wrong_batches(checked)) == [
        "rank 1 read in step 2 a batch that it had read in an earlier step, 0"
    ]


def test_a_slow_configuration_must_be_explained() -> None:
    """Steps that take longer than all ranks run, wait for a CPU and send are a fault; a busy machine is none."""
    checked, record = clean(sleeps_counted=True)
    ranks = [rank.model_copy(update={"ledger": [], "alone": []}) for rank in record.ranks]
    bare = record.model_copy(update={"ranks": ranks, "processor_use": None})
    assert slowed(checked, bare) is None
    idle = [replace(check, steps=[Spent(0.4, 0.05, 0.35)] * 3) for check in checked]
    assert "nothing explains 0.6" in (slowed(idle, bare) or "")
    busy = [replace(check, steps=[Spent(0.4, 0.05, 0.1, 0.25)] * 3) for check in checked]
    assert slowed(busy, bare) is None


@pytest.mark.parametrize(
    ("used", "slow"), [((0.036,), False), ((0.2,), True), ((0.2, 0.2, 0.2, 0.036), False), ((0.3, 0.2), True)]
)
def test_messages_of_a_tiny_model_are_no_slow_configuration(used: tuple[float, ...], slow: bool) -> None:
    """Four ranks on two processors needed 0.036 s for messages, where the model needs 0.003 s; 0.2 s is too much if all
    ranks take so long.
    """
    checked, record = clean(4, sleeps_counted=True)
    alone = Alone(
        when="before", forward=0.001, backward=0.002, optimizer=0.0004,
        cpu_seconds=0.003, optimizer_cpu_seconds=0.0004,
    )  # fmt: skip
    sent = LedgerRow(
        phase="forward", purpose="weights", unit="blocks.0", hop="node", link="inter",
        bytes=4 * 630_784, messages=132,
    )  # fmt: skip
    ranks = [
        rank.model_copy(
            update={
                "alone": [alone],
                "ledger": [sent],
                "steps": [step.model_copy(update={"cpu_seconds": seconds}) for step in rank.steps],
            }
        )
        for rank, seconds in zip(record.ranks, itertools.cycle(used))
    ]
    found = slowed(checked, record.model_copy(update={"ranks": ranks})) or ""
    assert ("but the model alone takes 0.003 s" in found) == slow
    assert (f"computed for {min(used):.3f} s" in found) == slow


@pytest.mark.long
def test_no_rank_of_the_reference_results_comes_near_the_limits_of_computing() -> None:
    """metrics.md states how many ranks there are, and the largest shares of the two limits."""
    shares: dict[bool, list[float]] = {False: [], True: []}
    for archive in sorted((ROOT / REFERENCE).glob("*.tar.xz")):
        for record in committed(archive.name.removesuffix(".tar.xz")):
            trial = Trial.from_canonical(record.trial)
            policy = trial.resolved_policy()
            if policy is None or record.failure is not None:
                continue
            codecs = (*policy.codecs, *(policy.owned if trial.optimizer.orthogonalises else ()))
            encodes = policy.own_reduce is not None or any(not isinstance(codec, Raw) for codec in codecs)
            for own in record.ranks:
                timed = sum(not step.warmup for step in own.steps)
                found = computed(own, trial.accumulation, encodes=encodes, timed=timed)
                if found is not None:
                    shares[encodes].append(found.used / found.allowed)
    plain, coded = max(shares[False]), max(shares[True])
    text = f"Of the {len(shares[False]) + len(shares[True]):,} ranks of the reference results, none takes more than "
    text += f"{plain:.2f} of the first limit or {coded:.2f} of the second."
    assert text in (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
