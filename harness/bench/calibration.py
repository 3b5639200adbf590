"""``zeropp calibrate``: measures what this machine achieves, so that steps can be predicted.

Trials over an open and a slow link give a :class:`~impl.plan.step_time.Machine` by non-negative least squares
of relative errors of processor seconds; no step's duration is fitted.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from scipy.optimize import nnls

from harness.bench import codecs as bench_codecs
from harness.bench.rounds import timed
from harness.cluster.link import open_link
from harness.cluster.rank import Rank
from harness.cluster.rank_processes import Launch, run_ranks
from harness.errors import Refusal
from harness.measure import machine as host
from harness.records.record import Record, path_of, read, slowest_seconds
from harness.runs.further_repeats import Batch
from harness.runs.predict import step_of_trial, units_of
from harness.runs.sweep import run_sweep
from harness.suites.suite import Suite
from harness.suites.trial import Cluster, Trial
from impl.comm.mesh import Mesh
from impl.comm.wire import Wire
from impl.plan.step_time import CodecCost, Machine, Step, step_of
from impl.plan.topology import Topology
from impl.plan.traffic import Tag

CODECS: Final = (
    "fp32", "bf16", "fp16", "int8:2048", "int8:128", "int6:256", "int4:128", "int4:256:clip", "int4:2048",
    "int3:256", "int2:256", "fp8e4m3:128", "mxfp8", "mxfp4", "int4:128:hadamard32", "int4:256:stochastic",
    "int8:256:stochastic",
)  # fmt: skip
RATE: Final = "100 Mbit/s"  # of the link that is held to a rate
SUITE: Final = "calibration"
_CODEC_SECONDS: Final = 0.2  # for each operation
_CODEC_MEBIBYTES: Final = 2  # of elements: as large as the shards of small models are
_MESSAGES: Final = 200  # tiny ones, one after the other
_TIMEOUT_SECONDS: Final = 600.0
_TRIALS: Final = (  # model, layers, tokens of a rank, strategy, whether the link is held to the rate
    ("gpt-small", 2, 256, "zero3", False),
    ("gpt-tiny", 2, 256, "zero3", False),
    ("gpt-tiny", 2, 1024, "zeropp", False),
    ("gpt-small", 2, 1024, "zeropp", False),
    ("gpt-small", 4, 256, "zero3", False),
    ("gpt-small", 4, 256, "zeropp", False),
    ("gpt-small", 4, 1024, "zero3", False),
    ("gpt-small", 4, 1024, "zero3-flat", False),
    ("gpt-small", 4, 512, "zeropp", True),
    ("gpt-small", 4, 512, "zero3", True),
)


def trials() -> list[Trial]:
    """What is run, in order: the first once more at the end, for has the machine changed meanwhile?"""
    asked = [
        {
            "sequence": 128, "steps": 16, "warmup": 2, "tokens_per_rank": tokens, "strategy": strategy,
            "model": {"name": model, "arguments": {"layers": layers}},
            "cluster": {"nodes": 2, "ranks_per_node": 2, "rate": RATE if held else "unshaped"},
        }
        for model, layers, tokens, strategy, held in _TRIALS
    ]  # fmt: skip
    return [Trial.model_validate(one) for one in (*asked, {**asked[0], "repeat": 1})]


def calibrate(name: str, results: Path, console: Console) -> Machine:
    """Measure this machine, ``name``; records stay below ``results``.  A failed trial is a Refusal."""
    asked, folder = trials(), results / f"{SUITE}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    suite = Suite(name=SUITE, question="What does this machine achieve?")
    outcome = run_sweep(suite, [Batch(0, tuple(asked))], folder, console)
    if outcome.failed or outcome.interrupted:
        raise Refusal(f"{folder}: {outcome.failed} of {len(asked)} trials failed; `zeropp show` says why")
    records = [read(path_of(folder, trial.id)) for trial in asked]
    measured = [Measured.of(trial, record) for trial, record in zip(asked, records, strict=True)]
    log = folder / "calibration.log"
    with open_link(Cluster(nodes=2), SUITE[:6]) as link:
        launch = Launch(Topology(2, 2), link.ports, link.paced_mbit, 1, _TIMEOUT_SECONDS, log)
        latencies, codecs = zip(*run_ranks(_probed, _MESSAGES, launch), strict=True)
    return fit(
        Machine(
            name=name,
            source=f"zeropp calibrate, {len(asked)} trials",
            fixed=1.0,
            per_token=0.0,
            efficiency=1.0,
            fewest=min(trial.tokens_per_rank for trial in asked),
            most=max(trial.tokens_per_rank for trial in asked),
            smallest=min(one.step.parameters for one in measured),
            largest=max(one.step.parameters for one in measured),
            overlap="schedule",
            latency=statistics.median(latencies),
            processors=host.cores(),
            emulated=True,
            spread=abs(measured[-1].took / measured[0].took - 1),  # its drift
            date=f"{datetime.now(UTC):%Y-%m-%d}",
            host=host.identity(),
            codecs=codecs[0],
        ),
        measured,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one trial of the calibration took, in seconds of a rank's processor in a step."""

    step: Step  # what it asked for
    computing: float  # of its passes by themselves
    stepping: float  # of the optimizer by itself
    in_steps: float  # of all that it did in a step
    took: float  # of the clock, its median step
    # share of the asked rate that the link achieved; None where it was not held to one
    achieved: float | None

    @classmethod
    def of(cls, trial: Trial, record: Record) -> Measured:
        """From a trial's record."""
        step = step_of_trial(trial, units_of(trial, record), record.parameters)
        assert step is not None and record.link is not None  # noqa: S101, PT018  # of ours, and on two nodes
        alone = [one for rank in record.ranks for one in rank.alone]
        timed = [one.cpu_seconds or 0.0 for rank in record.ranks for one in rank.steps if not one.warmup]
        rate, probed = trial.cluster.rate, record.link.probed_mbit or record.link.calibrated_mbit
        return cls(
            step=step,
            computing=statistics.median(one.cpu_seconds for one in alone),
            stepping=statistics.median(one.optimizer_cpu_seconds for one in alone),
            in_steps=statistics.median(timed),
            took=statistics.median(slowest_seconds(record)),
            achieved=statistics.median(probed) / rate if rate and probed else None,
        )


def fit(machine: Machine, measured: Sequence[Measured]) -> Machine:
    """``machine`` with what the trials say of computing, of the engine and of the link.

    Computing is a sum of ``launch``, ``fixed`` and ``per_token``; what a rank does beside computing, stepping
    and coding one of ``unit``, ``element``, ``message`` and ``sent``, scaled by how much slower than the
    first fit its own computing ran.  Threads that wait are woken, so trials over the slow link are left out
    of the second.  ``spread`` is the larger of the machine's drift and of the steps around their predictions.
    """
    achieved = [one.achieved for one in measured if one.achieved is not None]
    blank = replace(machine, latency=0.0, processors=0, codecs={})  # not fitted yet
    computing, steps = [one.computing for one in measured], [one.step for one in measured]
    passes: dict[str, Sequence[float]] = {
        "launch": [len(step.units) for step in steps],
        "fixed": [step.parameters for step in steps],
        "per_token": [step.parameters * step.tokens for step in steps],
    }
    machine = replace(machine, **_fitted(passes, computing, computing))

    free = [one for one in measured if one.achieved is None]

    def busy(**what: Any) -> list[float]:
        """Seconds of a rank's processor in each of these steps, of nothing but what is given."""
        made = replace(blank, **what)
        return [step_of(made, replace(one.step, parameters=0.0, rate=math.inf)).seconds for one in free]

    seconds = []
    for one, coding in zip(free, busy(codecs=machine.codecs), strict=True):
        slower = one.computing / machine.compute(one.step.parameters, one.step.tokens, len(one.step.units))
        seconds.append(max(0.0, (one.in_steps - one.computing - one.stepping) / slower - coding))
    terms = {name: busy(**{name: 1.0}) for name in ("unit", "element", "message", "sent")}
    engine = _fitted(terms, seconds, [one.in_steps for one in free])
    stepping = [one.stepping / sum(unit.shard for unit in one.step.units) for one in measured]
    made = replace(
        machine,
        **engine,
        optimizer=statistics.median(stepping),
        efficiency=min(1.0, statistics.median(achieved)) if achieved else 1.0,
        latency=max(0.0, machine.latency - engine["message"]),  # a tiny gather is one message of the engine's
    )
    errors = [math.log(one.took / step_of(made, one.step).seconds) for one in measured]
    return replace(made, spread=max(machine.spread, float(np.sqrt(np.mean(np.square(errors))))))


def _fitted(
    terms: Mapping[str, Sequence[float]], seconds: Sequence[float], over: Sequence[float]
) -> dict[str, Any]:
    """Non-negative factors of the terms whose sums are nearest to ``seconds``, relative to ``over``."""
    weights = 1 / np.maximum(np.array(over), 1e-9)
    matrix = np.array([*terms.values()]).T * weights[:, None]
    scale = matrix.max(axis=0)
    found, _ = nnls(matrix / scale, np.array(seconds) * weights)
    return {name: float(value) for name, value in zip(terms, found / scale, strict=True)}


def _probed(rank: Rank, messages: int) -> tuple[float, dict[str, CodecCost]]:
    """Median seconds of a tiny all-gather between nodes; on rank 0 seconds of an element by codec."""
    mesh = Mesh.create(rank.topology)
    wire = Wire(mesh)

    def gather() -> None:
        exchange = wire.all_gather(rank.topology.node_axis, 64, Tag("step", "control"))
        exchange.send.zero_()
        exchange.post()
        exchange.wait()
        exchange.close()

    latency = statistics.median(timed(gather)() for _ in range(messages))
    if rank.rank:
        return latency, {}
    samples = bench_codecs.measure(
        rank, codecs=CODECS, backends=("cpu",), kinds=("fp32",), mebibytes=_CODEC_MEBIBYTES,
        seconds=_CODEC_SECONDS,
    )  # fmt: skip
    costs: dict[str, dict[str, float]] = {text: {} for text in CODECS}
    for one in samples:
        of_element = statistics.median(one.seconds) / (one.sizes["element_bytes"] / 4)
        costs[str(one.names["codec"])][str(one.names["operation"])] = of_element
    return latency, {text: CodecCost(encode=of["encode"], decode=of["decode"]) for text, of in costs.items()}
