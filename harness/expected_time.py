"""Estimates how long a suite takes here, from a short measurement of how fast a core computes.

A step takes the forward and backward passes of its micro-batches, longer with more ranks than cores, and the
time of its bytes at the link's rate.  A trial takes its steps, the passes of the checks around them, its
validations, and :data:`OVERHEAD` seconds for the rest.
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
from harness.suites.peers import PEERS
from harness.suites.trial import Model
from impl.codecs.codec import ITEM_BYTES
from impl.cpu.build import BuildError, user_cache

OVERHEAD: Final = 4.5  # seconds of a trial beside its steps, on 2 cores
_CHECKS: Final = 6  # passes of a micro-batch before and after the steps
_ERRORS: Final = 8  # more passes if errors of messages are measured, in the first repeat
_MEASURED: Final = (2, 128)  # sequences, and tokens of each, of a measured pass
_OPERATIONS: Final = 6  # floating-point operations of a parameter and token, forward and backward
_FORWARD: Final = 1 / 3  # share of a pass


class Estimate(NamedTuple):
    """The time of all trials of a suite."""

    seconds: float | None  # None if they cannot be estimated
    sentence: str


def estimate(forecasts: Sequence[Forecast]) -> Estimate:
    """Estimate how long the trials take one after the other, or say why that is not possible."""
    possible = [forecast for forecast in forecasts if not forecast.reasons]
    if not possible:
        return Estimate(None, "No expected time: no trial runs.")
    clusters = [forecast.trial.cluster for forecast in possible]
    if any(cluster.device != "cpu" or cluster.launcher != "local" for cluster in clusters):
        return Estimate(None, "No expected time: it is estimated for the processors of one machine alone.")
    flops = core_flops()
    seconds = sum(_trial_seconds(forecast, flops) for forecast in possible)
    sentence = (
        f"Expected here: about {spoken(seconds)}, an estimate: {flops / 1e9:.2g} GFLOPS of a core (measured "
        f"in a small GPT), bytes at the link's rate, and {OVERHEAD:g} s a trial."
    )
    return Estimate(seconds, sentence)


def _trial_seconds(forecast: Forecast, flops: float) -> float:
    trial, world = forecast.trial, forecast.trial.topology().world
    ranks, parts = (1, world) if trial.strategy == "single" else (world, 1)
    threads = trial.threads or max(1, machine.cores() // ranks)
    operations = _OPERATIONS * (forecast.parameters or 0) * trial.tokens_per_rank * parts
    computing = operations / flops / min(threads, machine.cores() / ranks)  # of a micro-batch
    micro_batches = float(trial.accumulation)
    if trial.workload == "generate":
        micro_batches = _FORWARD * (1 + trial.generate.tokens / trial.sequence)
    if trial.workload == "rlhf":  # and two frozen models pass over the decoded tokens
        micro_batches += _FORWARD * (3 + trial.generate.tokens / trial.sequence)
    sent, rate = forecast.egress, trial.slowest_mbit
    if sent is None and ranks > 1:  # a peer: rings of an all-reduce, or of two all-gathers and a reduction
        peer = PEERS[trial.strategy]
        rings = 2 if peer.family == "ddp" else 3 * trial.accumulation
        sent = rings * (forecast.parameters or 0) * ITEM_BYTES[peer.wire(trial.peer.compute)]
    wire = sent * 8 / (rate * 1e6) if sent and rate and trial.cluster.nodes > 1 else 0.0
    steps = trial.warmup + trial.steps
    passes = float(_CHECKS + (_ERRORS if trial.measure_quantisation and trial.repeat == 0 else 0))
    if trial.validate_every is not None:
        times = 1 + (steps // trial.validate_every if trial.validate_every else 0)
        passes += times * trial.validation_batches * _FORWARD
    return OVERHEAD + passes * computing + steps * (micro_batches * computing + wire)


@cache
def core_flops() -> float:
    """Floating-point operations a second of one core, in a small GPT's pass forward and backward.

    They are measured once on a machine, and kept in the user's cache: torch takes longer to import than a
    suite takes to plan.
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
    """Measure them, by three passes."""
    import torch

    from harness.workloads.models import build

    threads, seconds = torch.get_num_threads(), list[float]()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng():
            model = build(Model(), _MEASURED[1])
        tokens = torch.zeros(_MEASURED, dtype=torch.int64)
        for _ in range(3):
            begun = time.process_time()  # without other processes
            model(tokens, tokens).backward()
            seconds.append(time.process_time() - begun)
    finally:
        torch.set_num_threads(threads)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return _OPERATIONS * parameters * tokens.numel() / min(seconds)


def spoken(seconds: float) -> str:
    """Seconds, minutes or hours with their unit, in two digits."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min" if seconds >= 600 else f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"
