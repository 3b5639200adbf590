"""Estimates how long a suite takes on this machine, from a short measurement of how fast a core computes.

The time of a step is the time of computing its micro-batches plus the time that its bytes take at the link's rate.
Computing takes longer if there are more ranks than cores.  A trial takes the time of its steps, of its validations and
of the forward and backward passes that check it, plus :data:`OVERHEAD` seconds to start and end.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from typing import Final, NamedTuple

from harness.measure import machine
from harness.records.trial_record import RecordError, write_whole
from harness.runs.feasibility import Forecast
from harness.suites.peers import PEERS, Compute
from harness.suites.trial import Model
from impl.codecs.codec import ITEM_BYTES
from impl.cpu.build import BuildError, user_cache

_TURN: Final = (
    0.007  # seconds that a micro-batch of a thread rank takes besides computing, measured with gpt-tiny
)
OVERHEAD: Final = 4.5  # seconds that a trial takes besides its passes, measured on 2 cores
_CHECKS: Final = 6  # passes of a micro-batch that check a trial before and after its steps
_ERRORS: Final = 8  # further passes of the first repeat if communication errors are measured
_MEASURED: Final = (2, 128)  # batch that core_flops() times: sequences, and tokens of each
_OPERATIONS: Final = 6  # floating-point operations for each parameter and token, forward and backward
# Roles of the user's own objects that do not affect the estimate, so that they need not be imported for it.
_UNTIMED: Final = ("corpus", "tokenizer", "optimizer")
_FORWARD: Final = 1 / 3  # share of a step's floating-point operations that belong to the forward pass


class Estimate(NamedTuple):
    """The estimated time of all trials of a suite together."""

    seconds: float | None  # None if the time cannot be estimated
    sentence: str  # the estimate with its assumptions, or why the time cannot be estimated


def estimate(forecasts: Sequence[Forecast]) -> Estimate:
    """Estimate how many seconds the trials of ``forecasts`` take together, if they run one after the other.

    Each forecast describes one trial.  Trials that cannot run on this machine are left out.  If no time can be
    estimated, as for trials on GPUs or on several machines, the result's ``seconds`` is None, and its ``sentence``
    gives the reason.
    """
    possible = [forecast for forecast in forecasts if not forecast.reasons]
    if not possible:
        return Estimate(None, "No expected time: no trial can run here.")
    clusters = [forecast.trial.cluster for forecast in possible]
    if any(cluster.device != "cpu" or cluster.launcher != "local" for cluster in clusters):
        return Estimate(
            None, "No expected time: it can be estimated only for trials on the CPU of this machine."
        )
    if any(role not in _UNTIMED for f in possible for role in f.unread):
        return Estimate(None, "No expected time: it needs the sizes of modules that were not imported.")
    flops = core_flops()
    seconds = sum(_trial_seconds(forecast, flops) for forecast in possible)
    sentence = (
        f"Expected here: about {spoken(seconds)}. This estimate assumes {flops / 1e9:.2g} GFLOPS a core "
        f"(measured on this machine with a small GPT), bytes sent at the link's rate, and {OVERHEAD:g} s of overhead "
        "a trial."
    )
    return Estimate(seconds, sentence)


def _trial_seconds(forecast: Forecast, flops: float) -> float:
    trial, world = forecast.trial, forecast.trial.topology().world
    ranks, parts = (1, world) if trial.strategy == "single" else (world, 1)
    threads = trial.threads or max(1, machine.cores() // ranks)
    at_once = machine.cores() / ranks if trial.measures_time else 1 / ranks  # thread ranks take turns
    operations = _OPERATIONS * (forecast.parameters or 0) * trial.tokens_per_rank * parts
    computing = operations / flops / min(threads, at_once)  # seconds of a micro-batch
    computing += 0.0 if trial.measures_time else _TURN * ranks
    micro_batches = float(trial.accumulation)
    if trial.workload == "generate":
        micro_batches = _FORWARD * (1 + trial.generate.tokens / trial.sequence)
    if trial.workload == "rlhf":  # the actor decodes, then it and two frozen models read the result
        micro_batches += _FORWARD * (3 + trial.generate.tokens / trial.sequence)
    sent, rate = forecast.egress, trial.slowest_mbit
    # The bytes of other engines (peers), and of some methods of a user's own, are not predicted.  Assume that every
    # collective is a ring, in which each rank sends the whole model about once.  DDP's all-reduce counts as two rings a
    # step.  FSDP2 and our engine need three for each micro-batch: two all-gathers and a reduce-scatter.
    if sent is None and ranks > 1:
        peer = PEERS.get(trial.strategy)
        rings = 2 if peer is not None and peer.family == "ddp" else 3 * trial.accumulation
        dtype: Compute = "bf16" if peer is None or peer.wire(trial.peer.compute) == "bf16" else "fp32"
        sent = rings * (forecast.parameters or 0) * ITEM_BYTES[dtype]
    wire = sent * 8 / (rate * 1e6) if sent and rate and trial.cluster.nodes > 1 else 0.0
    steps = trial.warmup + trial.steps
    passes = float(_CHECKS + (_ERRORS if trial.measure_quantisation and trial.repeat == 0 else 0))
    if trial.validate_every is not None:
        times = 1 + (steps // trial.validate_every if trial.validate_every else 0)
        passes += times * trial.validation_batches * _FORWARD
    return OVERHEAD + passes * computing + steps * (micro_batches * computing + wire)


@cache
def core_flops() -> float:
    """Return the floating-point operations per second of one core, in a forward and backward pass of a small GPT.

    The first call measures the number, and keeps it in a file in the user's cache folder.  The number is measured again
    on another machine, and with another version of torch.  torch is imported only to measure, since importing torch
    takes longer than planning a suite.
    """
    key = f"{machine.identity()}, torch {version('torch')}"
    try:
        path = user_cache() / "core_flops.json"
    except BuildError:  # there is no folder for it
        return measured_flops()
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # not measured yet, or damaged
        return float(json.loads(path.read_text(encoding="utf-8"))[key])
    flops = measured_flops()
    with contextlib.suppress(RecordError):
        write_whole(path, json.dumps({key: flops}))
    return flops


def measured_flops() -> float:
    """Measure the floating-point operations per second of one core.

    A forward and backward pass of a small GPT is timed three times, and the fastest counts.  The time is processor
    time, which other processes do not lengthen.
    """
    import torch

    from harness.workloads.models import build

    threads, seconds = torch.get_num_threads(), list[float]()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng():
            model = build(Model(), _MEASURED[1])
        tokens = torch.zeros(_MEASURED, dtype=torch.int64)
        for _ in range(3):
            begun = time.process_time()
            model(tokens, tokens).backward()
            seconds.append(time.process_time() - begun)
    finally:
        torch.set_num_threads(threads)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return _OPERATIONS * parameters * tokens.numel() / min(seconds)


def spoken(seconds: float) -> str:
    """Return a duration, given in seconds, as text with a suitable unit: ``4.5 min`` for 270."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min" if seconds >= 600 else f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"
