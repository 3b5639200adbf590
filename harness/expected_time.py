"""Estimates how long a suite takes here, from a short measurement of its models' computing.

A step takes the forward and backward passes of its micro-batches, stretched where there are more ranks than
cores, and the time that its bytes take at the link's rate.  A trial takes its steps, as much again of
computing for what is checked around them, its validations, and :data:`OVERHEAD` seconds for the rest.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from harness.errors import one_line
from harness.measure import machine
from harness.plan_rows import ring_egress
from harness.runs.feasibility import Forecast
from harness.suites.model_sizes import IMAGE_SIDE
from harness.suites.trial import Trial
from harness.workloads import samples
from harness.workloads.glyph_images import GLYPHS
from impl.errors import raised

if TYPE_CHECKING:
    from torch import Tensor

OVERHEAD: Final = 4.5  # seconds of a trial beside its steps, on 2 cores
_CHECKS: Final = 6  # passes of a micro-batch before and after the steps
_ERRORS: Final = 8  # and more where errors of what is sent are measured, in the first repeat
_BUDGET: Final = 1.0  # seconds of measuring, all models together
_MOST_FLOPS: Final = 3e10  # of a pass that is measured
_FORWARD: Final = 1 / 3  # share of a pass


@dataclass(frozen=True, slots=True)
class Expected:
    """An estimate for a suite.

    Attributes:
        seconds: of all its trials.
        computing: seconds of a micro-batch forward and backward, one rank alone, of each model.
    """

    seconds: float
    computing: tuple[float, ...]

    def __str__(self) -> str:
        low, high = min(self.computing), max(self.computing)
        each = f"{low:.2g}" if high < 1.1 * low else f"{low:.2g} to {high:.2g}"
        return (
            f"Expected here: about {spoken(self.seconds)}, an estimate: {each} s of computing in a "
            f"micro-batch (measured now), bytes at the link's rate, and {OVERHEAD:g} s a trial."
        )


def expected(found: Sequence[Forecast]) -> Expected | str:
    """Estimate how long the trials take one after the other; or say why that cannot be said."""
    if any(one.problems for one in found):
        return "no trial runs" if all(one.problems for one in found) else "some trials cannot run"
    asked = [one for one in found if not one.beyond_limit and not one.refusal]
    if not asked:
        return "no trial runs"
    if any(one.trial.cluster.device != "cpu" or one.trial.cluster.launcher != "local" for one in asked):
        return "it is estimated for the processors of one machine alone"
    measured: dict[str, float] = {}
    speed: list[float] = []  # seconds a FLOP of those measured
    spent = time.monotonic()
    for one in sorted(asked, key=_flops):
        if (key := _key(one.trial)) in measured:
            continue
        if time.monotonic() - spent > _BUDGET and speed:
            measured[key] = speed[-1] * _flops(one)
            continue
        sequences = _measurable(one)
        if not sequences:
            return f"a pass of {one.trial.model.name!r} is too long to be measured"
        try:
            seconds = _pass_seconds(one.trial, sequences)
        except (Exception, SystemExit) as error:  # of a user's own model
            return f"model {one.trial.model.name!r} cannot be tried: {one_line(raised(error))}"
        measured[key] = seconds * (one.trial.tokens_per_rank // one.trial.sequence) / sequences
        speed.append(measured[key] / _flops(one))
    total = sum(_trial_seconds(one, measured[_key(one.trial)]) for one in asked)
    return Expected(total, tuple(measured.values()))


def _trial_seconds(one: Forecast, computing: float) -> float:
    trial = one.trial
    ranks = 1 if trial.strategy == "single" else trial.topology().world
    parts = trial.topology().world if trial.strategy == "single" else 1
    threads = trial.threads or max(1, machine.cores() // ranks)
    computing *= parts * max(1.0, ranks * threads / machine.cores())
    micro_batches = float(trial.accumulation)
    if trial.workload == "generate":
        micro_batches = _FORWARD * (1 + trial.generate.tokens / trial.sequence)
    if trial.workload == "rlhf":  # and two frozen models pass over what was decoded
        micro_batches += _FORWARD * (3 + trial.generate.tokens / trial.sequence)
    sent = one.egress if one.egress is not None else ring_egress(one)
    rate = trial.slowest_mbit
    wire = sent * 8 / (rate * 1e6) if sent and rate and trial.cluster.nodes > 1 else 0.0
    steps = trial.warmup + trial.steps
    passes = float(_CHECKS + (_ERRORS if trial.measure_quantisation and trial.repeat == 0 else 0))
    if trial.validate_every is not None:
        times = 1 + (steps // trial.validate_every if trial.validate_every else 0)
        passes += times * trial.validation_batches * _FORWARD
    return OVERHEAD + passes * computing + steps * (micro_batches * computing + wire)


def _key(trial: Trial) -> str:
    """Equal for trials of one micro-batch and one model."""
    policy = trial.resolved_policy()
    compute = trial.peer.compute if policy is None else policy.compute
    parts = (trial.model, trial.corpus, trial.sequence, trial.tokens_per_rank, compute)
    return repr((*parts, trial.activation_checkpointing, trial.threads))


def _flops(one: Forecast) -> float:
    """Roughly, of a micro-batch forward and backward."""
    return 6.0 * (one.parameters or 1) * one.trial.tokens_per_rank


def _measurable(one: Forecast) -> int:
    """Sequences of a micro-batch that take a moment; 0 if one does not."""
    sequences = one.trial.tokens_per_rank // one.trial.sequence
    return min(sequences, int(_MOST_FLOPS * sequences / _flops(one)))


def _pass_seconds(trial: Trial, sequences: int) -> float:
    """Seconds of a forward and backward pass of one rank, as if alone on the machine."""
    import torch

    from harness.workloads import models

    policy = trial.resolved_policy()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[
        trial.peer.compute if policy is None else policy.compute
    ]
    ranks = 1 if trial.strategy == "single" else trial.topology().world
    with _threads(trial.threads or max(1, machine.cores() // ranks)), torch.random.fork_rng():
        model, batch = models.of_trial(trial).to(dtype), _batch(trial, sequences)
        if batch[0].is_floating_point():
            batch = (batch[0].to(dtype), batch[1])
        found: list[float] = []
        while len(found) < 3 and sum(found) < _BUDGET / 3:
            begun = time.process_time()  # what else runs here does not count
            model(*batch).backward()
            found.append((time.process_time() - begun) / torch.get_num_threads())
    return min(found)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _batch(trial: Trial, sequences: int) -> tuple[Tensor, Tensor]:
    """Of the trial's shapes; what is in it does not matter, except in a user's own pairs."""
    import torch

    if trial.corpus == GLYPHS:
        return torch.rand(sequences, IMAGE_SIDE, IMAGE_SIDE), torch.zeros(sequences, dtype=torch.int64)
    if (own := samples.own_pairs(trial)) is not None:
        pair = own.batch(seed=0, step=0, micro_batch=0, rank=0, sequences=sequences)
        return torch.tensor(pair[0]), torch.tensor(pair[1])
    tokens = torch.zeros(sequences, trial.sequence, dtype=torch.int64)
    return tokens, tokens


def spoken(seconds: float) -> str:
    """Seconds in words, of two digits."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min" if seconds >= 600 else f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"
