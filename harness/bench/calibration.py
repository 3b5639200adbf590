"""``zeropp calibrate``: measures this machine, so that the duration of steps can be predicted.

A few short trials run over a link without a limited rate and over a slow link.  A cost model predicts the duration of a
step from costs such as the seconds for each message.  These costs are fitted to the processor seconds that ranks used,
by non-negative least squares of relative errors.  The fields of :class:`~impl.plan.step_time.Machine` hold the costs.
The duration of steps is not fitted.  It is predicted from the fitted costs, and the error of this prediction becomes
the machine's ``spread``.
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
from harness.records.trial_record import Record, path_of, read, slowest_seconds
from harness.runs.further_repeats import Batch
from harness.runs.predict import units_of
from harness.runs.sweep import run_sweep
from harness.runs.trial_step import step_of_trial
from harness.suites.suite import Suite
from harness.suites.trial import Cluster, Trial
from impl.comm.mesh import Mesh
from impl.comm.wire import Wire
from impl.plan.step_time import ALTERNATIVE, EQUAL_FITS, CodecCost, Machine, Step, step_of
from impl.plan.traffic import Tag
from impl.policy.topology import Topology

CODECS: Final = (
    "fp32", "bf16", "fp16", "int8:2048", "int8:128", "int6:256", "int4:128", "int4:256:clip", "int4:2048",
    "int3:256", "int2:256", "fp8e4m3:128", "mxfp8", "mxfp4", "int4:128:hadamard32", "int4:256:stochastic",
    "int8:256:stochastic",
)  # fmt: skip
RATE: Final = "100 Mbit/s"  # rate of the slow link
SUITE: Final = "calibration"
_CODEC_SECONDS: Final = 0.2  # spent on each operation of a codec
_CODEC_MEBIBYTES: Final = 2  # of elements that are encoded: about a shard of a small model
_MESSAGES: Final = 200  # tiny messages sent one after the other, whose median time is the latency
_TIMEOUT_SECONDS: Final = 600.0
# Costs that fit_all() leaves out, one at a time, to find alternative fits.
_OPTIONAL: Final = ("launch", "fixed", "unit", "element", "message", "sent")
_SAME: Final = 1e-3  # relative difference up to which the values of two fits count as equal
_TRIALS: Final = (  # model, layers, tokens of a rank, strategy, whether the link is slow
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
    """Return the trials of a calibration, in the order in which they run.

    The last trial repeats the first.  The difference between their durations shows how far the machine's speed drifts.
    """
    fields = [
        {
            "sequence": 128, "steps": 16, "warmup": 2, "tokens_per_rank": tokens, "strategy": strategy,
            "model": {"name": model, "arguments": {"layers": layers}},
            "cluster": {"nodes": 2, "ranks_per_node": 2, "rate": RATE if held else "unshaped"},
        }
        for model, layers, tokens, strategy, held in _TRIALS
    ]  # fmt: skip
    return [Trial.model_validate(trial) for trial in (*fields, {**fields[0], "repeat": 1})]


def calibrate(name: str, results: Path, console: Console) -> Machine:
    """Measure this machine, and return its description with fitted costs.

    Args:
        name: Name of the returned machine.
        results: Folder of results.  The trials' records are written into a new folder in it, and stay there.
        console: Where progress is printed.

    Raises:
        KeyboardInterrupt: After Ctrl-C, once the record of the interrupted trial is written.
        Refusal: If a trial fails.
    """
    batch, folder = Batch(0, tuple(trials())), results / f"{SUITE}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    suite = Suite(name=SUITE, question="What does this machine achieve?")
    outcome = run_sweep(suite, [batch], folder, console)
    if outcome.interrupted:
        raise KeyboardInterrupt
    if outcome.failed:
        raise Refusal(
            f"{folder}: the calibration did not end ({outcome.failed} of {len(batch.trials)} trials failed); run "
            f"`zeropp show {folder}` for the reasons"
        )
    measured = [Measured.from_record(trial, read(path_of(folder, trial.id))) for trial in batch.trials]
    log = folder / "calibration.log"
    with open_link(Cluster(nodes=2), SUITE[:6]) as link:
        launch = Launch(Topology(2, 2), link.ports, link.paced_mbit, 1, _TIMEOUT_SECONDS, log)
        latencies, codecs = zip(*run_ranks(_probe, _MESSAGES, launch), strict=True)
    return fit_all(
        Machine(
            name=name,
            source=f"zeropp calibrate, {len(measured)} trials",
            fixed=1.0,
            per_token=0.0,
            efficiency=1.0,
            fewest=min(trial.tokens_per_rank for trial in batch.trials),
            most=max(trial.tokens_per_rank for trial in batch.trials),
            smallest=min(trial.step.parameters for trial in measured),
            largest=max(trial.step.parameters for trial in measured),
            overlap="schedule",
            latency=statistics.median(latencies),
            processors=host.cores(),
            emulated=True,
            spread=abs(measured[-1].wall / measured[0].wall - 1),  # the drift; fit() may raise it
            date=f"{datetime.now(UTC):%Y-%m-%d}",
            host=host.identity(),
            nature="calibration",
            codecs=codecs[0],
        ),
        measured,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measured seconds of one step of a calibration trial; processor seconds are those of one rank."""

    step: Step  # the work of the step
    computing: float  # processor seconds of forward and backward without communication
    stepping: float  # processor seconds of the optimizer without communication
    in_steps: float  # processor seconds of the whole step
    wall: float  # seconds from beginning to end of a step, on the slowest rank
    achieved: float | None  # share of the requested rate that the link achieved; None without a rate

    @classmethod
    def from_record(cls, trial: Trial, record: Record) -> Measured:
        """Return the medians of a trial's seconds, over all ranks and timed steps of the trial's record."""
        step = step_of_trial(trial, units_of(trial, record), record.parameters)
        # All trials run our own engine on two nodes.
        assert step is not None and record.link is not None  # noqa: S101, PT018
        alone = [sample for rank in record.ranks for sample in rank.alone]
        steps = [step for rank in record.ranks for step in rank.steps if not step.warmup]
        rate, probed = trial.cluster.rate, record.link.probed_mbit or record.link.calibrated_mbit
        return cls(
            step=step,
            computing=statistics.median(sample.cpu_seconds for sample in alone),
            stepping=statistics.median(sample.optimizer_cpu_seconds for sample in alone),
            in_steps=statistics.median(step.cpu_seconds or 0.0 for step in steps),
            wall=statistics.median(slowest_seconds(record)),
            achieved=statistics.median(probed) / rate if rate and probed else None,
        )


def fit_all(machine: Machine, measured: Sequence[Measured]) -> Machine:
    """Return ``machine`` with its costs fitted to the trials, and with alternative fits that are equally good.

    The best fit uses all trials and all costs.  For an alternative, one trial or one cost is left out of the fit.  An
    alternative is kept if its error over all trials (:func:`_error`) is at most
    :data:`~impl.plan.step_time.EQUAL_FITS` above the best fit's error.
    """
    best = fit(machine, measured)
    others = [fit(machine, [one for one in measured if one is not left_out]) for left_out in measured]
    others += [fit(machine, measured, without=name) for name in _OPTIONAL]
    most, alternatives = _error(best, measured) + EQUAL_FITS, list[dict[str, float]]()
    for other in others:
        changes = {
            name: getattr(other, name)
            for name in ALTERNATIVE
            if not math.isclose(getattr(other, name), getattr(best, name), rel_tol=_SAME)
        }
        if changes and changes not in alternatives and _error(other, measured) <= most:
            alternatives.append(changes)
    return replace(best, alternatives=tuple(alternatives))


def _error(machine: Machine, measured: Sequence[Measured]) -> float:
    """Return how far predicted durations of a step are from the measured durations.

    The result is the root mean square, over the trials, of ``log(measured / predicted)``.
    """
    errors = [math.log(trial.wall / step_of(machine, trial.step).seconds) for trial in measured]
    return float(np.sqrt(np.mean(np.square(errors))))


def fit(machine: Machine, measured: Sequence[Measured], *, without: str = "") -> Machine:
    """Return ``machine`` with its costs fitted to the processor seconds of the trials.

    The costs are fields of :class:`~impl.plan.step_time.Machine`, which says what each of them means.  There are two
    fits:

    - The first fit explains the seconds of forward and backward without communication by the costs ``launch``,
      ``fixed`` and ``per_token``.
    - The second fit explains the remaining seconds of a step by the costs ``unit``, ``element``, ``message`` and
      ``sent``.  The remaining seconds are ``(step - forward - backward - optimizer) / slower - encoding``.  ``slower``
      is the ratio of the trial's seconds of forward and backward to those that the first fit predicts.  ``encoding``
      is predicted from the codecs' measured costs.  Only trials over the link without a limited rate (the fast link)
      are used.  Over the slow link, ranks also spend processor time on waking threads that wait for messages.

    Other fields are computed.  ``optimizer`` and ``efficiency`` come from medians of measured values.  ``latency`` of
    the given machine is the median seconds of a tiny all-gather.  The fitted cost ``message`` is a part of these
    seconds, and is therefore subtracted.  ``spread``, which has been the drift of the machine's speed, becomes the
    larger of this drift and the error of predicted durations (:func:`_error`).

    Args:
        machine: The machine, with everything that is not fitted here.
        measured: The seconds of the trials.
        without: Name of a cost that is not fitted and stays 0; empty to fit all costs.
    """
    achieved = [trial.achieved for trial in measured if trial.achieved is not None]
    blank = replace(machine, latency=0.0, processors=0, codecs={})  # has no communication costs yet
    computing, steps = [trial.computing for trial in measured], [trial.step for trial in measured]
    passes: dict[str, Sequence[float]] = {
        "launch": [len(step.units) for step in steps],
        "fixed": [step.parameters for step in steps],
        "per_token": [step.parameters * step.tokens for step in steps],
    }
    passes.pop(without, None)
    machine = replace(machine, **{"launch": 0.0, "fixed": 0.0} | _fit_factors(passes, computing, computing))

    unshaped = [trial for trial in measured if trial.achieved is None]

    def busy(**costs: Any) -> list[float]:
        """Predict a step's processor seconds for each trial over the fast link, from the given ``costs`` alone."""
        steps = (replace(trial.step, parameters=0.0, rate=math.inf) for trial in unshaped)
        return [step_of(replace(blank, **costs), step).seconds for step in steps]

    seconds = []
    for trial, coding in zip(unshaped, busy(codecs=machine.codecs), strict=True):
        step = trial.step
        slower = trial.computing / machine.compute(step.parameters, step.tokens, len(step.units))
        seconds.append(max(0.0, (trial.in_steps - trial.computing - trial.stepping) / slower - coding))
    terms = {name: busy(**{name: 1.0}) for name in ("unit", "element", "message", "sent") if name != without}
    engine = {"message": 0.0} | _fit_factors(terms, seconds, [trial.in_steps for trial in unshaped])
    stepping = [trial.stepping / sum(unit.shard for unit in trial.step.units) for trial in measured]
    fitted = replace(
        machine,
        **engine,
        optimizer=statistics.median(stepping),
        efficiency=min(1.0, statistics.median(achieved)) if achieved else 1.0,
        # The probe's tiny all-gather is a message of the engine, whose cost was fitted as `message`.
        latency=max(0.0, machine.latency - engine["message"]),
    )
    return replace(fitted, spread=max(machine.spread, _error(fitted, measured)))


def _fit_factors(
    terms: Mapping[str, Sequence[float]], seconds: Sequence[float], over: Sequence[float]
) -> dict[str, Any]:
    """Fit a factor of at least 0 for each of ``terms``, and return the factors by name.

    In each trial, the sum of all terms, each multiplied by its factor, should equal the trial's ``seconds``.  The
    method is non-negative least squares over the trials.

    Args:
        terms: For each term, by name, its value in each trial.
        seconds: The seconds of each trial, which the sum should equal.
        over: For each trial, the number by which its error is divided before errors are squared.
    """
    weights = 1 / np.maximum(np.array(over), 1e-9)
    matrix = np.array([*terms.values()]).T * weights[:, None]
    scale = matrix.max(axis=0)
    factors, _ = nnls(matrix / scale, np.array(seconds) * weights)
    return dict(zip(terms, (factors / scale).tolist(), strict=True))


def _probe(rank: Rank, messages: int) -> tuple[float, dict[str, CodecCost]]:
    """Measure the seconds of an all-gather of 64 bytes between nodes and, on rank 0, the costs of each codec.

    Every rank calls this function.  The all-gather is repeated ``messages`` times.

    Returns:
        (seconds, costs): the median seconds of an all-gather, and the costs of each codec by its text form, in seconds
        an element.  On ranks other than 0, ``costs`` is an empty dict.
    """
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
    for sample in samples:
        elements = sample.sizes["element_bytes"] / 4
        operation = str(sample.names["operation"])
        costs[str(sample.names["codec"])][operation] = statistics.median(sample.seconds) / elements
    return latency, {text: CodecCost(encode=by["encode"], decode=by["decode"]) for text, by in costs.items()}
