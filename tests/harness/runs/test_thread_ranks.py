"""Trials whose ranks are threads of one process record what rank processes record, without seconds."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from harness.cluster.rank_processes import LaunchError, run_ranks
from harness.records.trial_record import read_all, slowest_seconds
from harness.runs.sweep import SweepOutcome
from harness.suites.trial import Trial
from harness.workloads.models import GPT, GPTShape
from impl.policy.topology import Topology
from report.build import build
from report.data.frames import load
from report.data.metrics import derive
from tests.harness.cluster.test_rank_processes import local
from tests.harness.runs.test_rank_trial import trial
from tests.harness.runs.test_sweep import sweep

THREADS: dict[str, Any] = {"nodes": 2, "ranks_per_node": 2, "ranks": "threads"}
FIELDS: dict[str, Any] = {"validate_every": 2, "measure_quantisation": True, "clip": 1.0, "accumulation": 2}


def _learns(strategy: str, **cluster: Any) -> Trial:
    return trial("stdlib", strategy, cluster={**THREADS, **cluster}, **FIELDS)


def _near(part: BaseModel, relative: float) -> dict[str, Any]:
    """The fields of a part of a record, with floating-point numbers that compare as equal to near ones."""
    fields = part.model_dump().items()
    return {k: pytest.approx(v, rel=relative) if isinstance(v, float) else v for k, v in fields}


def test_a_record_is_that_of_processes_without_seconds(tmp_path: Path) -> None:
    """Losses, ledgers, errors of messages and comparisons are equal; no second is on record, and no CPU time."""
    trials = [_learns("zeropp"), _learns("zeropp", ranks="processes", link="none")]
    outcome, shown = sweep(trials, tmp_path)
    assert outcome == SweepOutcome(ok=2), shown
    threads, processes = (
        next(record for record in read_all(tmp_path) if record.timed == timed) for timed in (False, True)
    )
    assert threads.link is not None
    assert (threads.link.kind, threads.ran["backend"], threads.ran["threads"]) == ("threads", "threads", 1)
    assert set(threads.ran["transports"].values()) == {"threads"}
    for rank, other in zip(threads.ranks, processes.ranks, strict=True):
        assert rank.ledger == other.ledger
        assert [(step.loss, step.gradient_norm) for step in rank.steps] == [
            (step.loss, step.gradient_norm) for step in other.steps
        ]
        for step in rank.steps:
            assert step.total == step.forward == step.backward == step.optimizer == 0
            assert step.exposed_forward is step.exposed_backward is step.cpu_seconds is None
        assert rank.alone == []
        assert rank.memory.engine == other.memory.engine
    assert [each.loss for each in threads.validations] == [each.loss for each in processes.validations]
    assert [each.train_seconds for each in threads.validations] == [0.0] * len(threads.validations)
    assert threads.processor_use is None
    assert threads.predicted is not None
    assert threads.predicted.equal
    assert threads.reference_loss == processes.reference_loss
    for error, other in zip(threads.communication_errors, processes.communication_errors, strict=True):
        assert _near(error, 1e-6) == other.model_dump()
    for tried, other in zip(threads.quantisation, processes.quantisation, strict=True):
        assert _near(tried, 1e-4) == other.model_dump()
    assert slowest_seconds(threads) == []
    assert "done" in shown


def test_the_page_says_that_no_seconds_were_measured(tmp_path: Path) -> None:
    """A page of thread ranks has losses and bytes, says why there are no seconds, and shows none."""
    trials = [
        _learns(strategy).model_copy(update={"seed": seed})
        for strategy in ("zero3", "zeropp")
        for seed in (0, 1)
    ]
    sweep(trials, tmp_path)
    derived = derive(load(tmp_path))
    assert derived.trials["step_seconds"].isna().all()
    assert derived.trials["validation_loss"].notna().all()
    assert (derived.trials["sent_bytes"] > 0).all()
    page = build(tmp_path).read_text(encoding="utf-8")
    assert "In all trials the ranks were threads of one process that took turns: no step was timed." in page
    assert "ranks are threads of one process that take turns, and no link joins the nodes" in page
    assert "Step, s" not in page
    # Nothing on the page speaks of a link's latency, of missing measurements, or of ratios of seconds.
    for absent in ("the link adds", "records are older", "nan to nan"):
        assert absent not in page


def failing(sequence: int) -> Any:
    """Return a model that fails on one rank in its third forward pass of training."""

    class Failing(GPT):
        passes = 0

        def forward(self, tokens: Any, targets: Any) -> Any:
            self.passes += self.training
            if self.passes == 3 and threading.current_thread().name == "rank 3":
                raise ZeroDivisionError("mine")
            return super().forward(tokens, targets)

    return Failing(GPTShape(1, 16, 1), sequence)


def test_a_failure_on_one_rank_is_recorded_with_its_number(tmp_path: Path) -> None:
    """The record names the rank whose error ended the trial, and the log has its traceback."""
    model = {"name": "tests.harness.runs.test_thread_ranks:failing"}
    policy = {"max_padding": 9.0}
    outcome, _ = sweep([trial("stdlib", "zeropp", cluster=THREADS, model=model, policy=policy)], tmp_path)
    assert outcome.failed == 1
    (record,) = read_all(tmp_path)
    assert record.failure is not None
    assert record.failure.message == (
        "the thread ranks: ZeroDivisionError: mine (raised on rank 3 of 4 ranks that are threads)"
    )
    assert any("ZeroDivisionError" in line for line in record.failure.tail)


def sleeps(_: Any, __: None) -> None:
    threading.Event().wait(60)


@pytest.mark.long
def test_ranks_that_do_not_end_are_killed_with_their_stacks(tmp_path: Path) -> None:
    """After the time-out the process of the thread ranks is killed, and the log has what each thread did."""
    launch = replace(local(Topology(1, 2), tmp_path / "log", seconds=12), threads_on="cpu")
    with pytest.raises(LaunchError, match="no result from the thread ranks after 12 s") as caught:
        run_ranks(sleeps, None, launch)
    assert caught.value.log is not None
    assert "in sleeps" in caught.value.log.read_text()
