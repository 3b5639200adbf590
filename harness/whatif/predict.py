"""Predicts from traces how long a step of a program would take under other policies and at other rates of the link.

Each prediction has an interval.  The module also finds the break-even rate, at which two policies take equally long.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, get_args

from harness.errors import Refusal
from harness.whatif import joint, policies
from harness.whatif.joint import JointStep, Traced
from harness.whatif.policies import REWRITES, SAME, Overheads, Predicted, Target
from impl.policy.topology import Topology

# Smallest and largest ratio of a rate to the traced rate that is predicted without a note.  docs/whatif_errors.md lists
# the measured errors of predictions between these ratios.
VALIDATED: Final = (0.5, 4.0)
CLOSE: Final = 0.02  # largest relative error with which the replay of a trace may miss the traced step
_FEW: Final = 5  # smallest number of traced steps without a note that the steps are few
_SEARCHED: Final = 1e3  # break-even is sought between the traced rate divided and multiplied by this factor
_GRID: Final = 13  # rates at which the sign of the difference is computed
_HALVINGS: Final = 12  # how often the interval with the break-even is then halved


@dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted step; seconds are medians over the traced steps.

    The step is predicted several times, under different assumptions.  ``low`` and ``high`` are the shortest and the
    longest duration found, ``low_speed_up`` and ``high_speed_up`` the smallest and the largest speed-up.  Two
    assumptions vary:

    - how the overhead of a collective changes with the policy and rate (:data:`~harness.whatif.policies.Overheads`);
    - which costs the machine has.  The machine file may hold several sets of costs (fits) that explain its measurements
      equally well.  They are used for presets of our engine only.
    """

    target: Target
    seconds: float  # duration of the step, if overheads scale with bytes over the rate
    low: float  # the shortest of the predicted durations
    high: float  # the longest of the predicted durations
    exposed: float  # seconds of waiting for messages, on the rank that waits longest
    link: float  # seconds in which the link between nodes is busy
    speed_up: float  # over the policy "same", the program as traced, at the same rate and topology
    low_speed_up: float  # the smallest of the predicted speed-ups
    high_speed_up: float  # the largest of the predicted speed-ups
    # Rate in bytes a second above which the policy is not faster than the program as traced; None if there is none.
    break_even: float | None
    notes: Sequence[str]

    @property
    def bound(self) -> str:
        """What limits the step: ``link`` if the link is busy longer than the ranks compute, otherwise ``processor``."""
        return "link" if self.link > self.seconds - self.exposed else "processor"


def check_replay(traced: Traced) -> list[float]:
    """Simulate each step as it was traced, and return the relative error of each simulated duration.

    The error of a step is 0.01 if its simulation, the replay, takes 1 % longer than the traced step.

    Raises:
        Refusal: In these cases:

            - the median of the errors' absolute values is above :data:`CLOSE`;
            - a traced step lasts 0 s or less;
            - a step has collectives, but one rank ended the step before another rank began it;
            - the user gave a traced rate, and at this rate a step's messages would take longer than the whole step.
    """
    for step in traced.steps:
        if step.seconds <= 0:
            raise Refusal(
                "a traced step lasts 0 s or less, from when the last rank begins it to when the last rank ends it: "
                "the traces must be of training steps, taken on all ranks in one run"
            )
        _check_overlap(step)
    replayed = [joint.replay(step, joint.as_traced(step)) for step in traced.steps]
    for run, step in zip(replayed, traced.steps, strict=True):
        if traced.rate_given and run.link > (1 + CLOSE) * step.seconds:
            raise Refusal(
                f"--traced-rate {in_words(traced.rate)}: at this rate the messages of a step take {run.link:.3g} s, "
                f"but the traced step lasted only {step.seconds:.3g} s: leave out --traced-rate, or correct it"
            )
    errors = [run.seconds / step.seconds - 1 for run, step in zip(replayed, traced.steps, strict=True)]
    if (median := statistics.median(map(abs, errors))) > CLOSE:
        raise Refusal(
            f"the traced steps are replayed with an error of {median:.1%}, and at most {CLOSE:.0%} is allowed: leave "
            "out or correct --traced-rate, or trace steps that end only after all their collectives, on a machine that "
            "runs nothing else"
        )
    return errors


def _check_overlap(step: JointStep) -> None:
    """Raise a Refusal if the step has collectives, but one rank ended the step before another rank began it."""
    ends = {rank: step.skew[rank] + own.end - own.begin for rank, own in step.ranks.items()}
    earliest, latest = min(ends, key=ends.__getitem__), max(step.skew, key=step.skew.__getitem__)
    if step.collectives and ends[earliest] <= step.skew[latest]:
        raise Refusal(
            f"rank {earliest} ended a traced step {step.skew[latest] - ends[earliest]:.3g} s before rank {latest} "
            "began it, although they exchange messages in it: give traces of one run, in which all ranks train together"
        )


def step_seconds(step: JointStep, traced: Traced, target: Target, overheads: Overheads) -> Predicted:
    """Predict how long one traced step would take under the target's policy, link rate and topology.

    ``overheads`` is ``scale`` or ``constant``: whether the overhead of a collective is assumed to grow with its time on
    the link, or to stay as traced (:data:`harness.whatif.policies.Overheads`).
    """
    if target.policy not in REWRITES:
        return policies.of_our_engine(step, traced, target, overheads).predicted
    runs = policies.rewritten(step, traced, target, overheads)
    run = joint.replay(step, runs, target.slower)
    return Predicted(run.seconds, run.exposed, run.link)


def _median(steps: Sequence[JointStep], traced: Traced, target: Target, overheads: Overheads) -> Predicted:
    found = [step_seconds(step, traced, target, overheads) for step in steps]
    return Predicted(
        statistics.median(one.seconds for one in found),
        statistics.median(one.exposed for one in found),
        statistics.median(one.link for one in found),
    )


def predict(traced: Traced, target: Target) -> Prediction:
    """Predict how long the traced program's step would take under the target's policy, link rate and topology.

    All seconds of the result are medians over the traced steps.

    Raises:
        Refusal: if the target has only one node, or if the traces do not allow its policy or topology.
    """
    if target.topology.nodes == 1:
        raise Refusal("one node has no link whose rate a step could depend on: set --nodes to 2 or more")
    policies.check(target.policy, traced)
    # Under a policy of REWRITES, only the codecs' seconds come from the machine, and all its fits have the same.
    fits = (target.machine,) if target.machine is None or target.policy in REWRITES else target.machine.fits
    found = {
        overheads: [_median(traced.steps, traced, replace(target, machine=fit), overheads) for fit in fits]
        for overheads in get_args(Overheads)
    }
    same = replace(target, policy=SAME)
    bases = {
        overheads: ours[0] if target.policy == SAME else _median(traced.steps, traced, same, overheads)
        for overheads, ours in found.items()
    }
    scaled, seconds = found["scale"][0], [one.seconds for ours in found.values() for one in ours]
    speed_ups = [bases[overheads].seconds / one.seconds for overheads, ours in found.items() for one in ours]
    return Prediction(
        target=target,
        seconds=scaled.seconds,
        low=min(seconds),
        high=max(seconds),
        exposed=scaled.exposed,
        link=scaled.link,
        speed_up=bases["scale"].seconds / scaled.seconds,
        low_speed_up=min(speed_ups),
        high_speed_up=max(speed_ups),
        break_even=None if target.policy == SAME else break_even(traced, target),
        notes=_notes(traced, target),
    )


def break_even(traced: Traced, target: Target) -> float | None:
    """Return the link rate, in bytes a second, above which the policy is no faster than the traced program.

    Rates from 1/1000 to 1000 times the traced rate are searched.  At each rate, the traced step of median duration is
    predicted under the target's policy and under policy ``same``.  Returns None if there is no rate in this range at
    which the policy stops being faster.
    """
    step = sorted(traced.steps, key=lambda step: step.seconds)[len(traced.steps) // 2]

    def gain(rate: float) -> float:
        at = replace(target, rate=rate)
        same = replace(at, policy=SAME)
        ours = step_seconds(step, traced, at, "scale").seconds
        return step_seconds(step, traced, same, "scale").seconds - ours

    low, high = traced.rate / _SEARCHED, traced.rate * _SEARCHED
    return _crossing(gain, [low * (high / low) ** (i / (_GRID - 1)) for i in range(_GRID)])


def _crossing(gain: Callable[[float], float], rates: Sequence[float]) -> float | None:
    """Return the largest rate at which ``gain`` changes from positive to zero or negative; None if there is none.

    ``gain`` is first computed at all ``rates``, which ascend.  Two neighbouring rates are found between which the sign
    of ``gain`` changes.  The interval between these two rates is then halved several times.
    """
    gains = [gain(rate) for rate in rates]
    place = next((i for i in reversed(range(len(rates) - 1)) if gains[i] > 0 >= gains[i + 1]), None)
    if place is None:
        return None
    low, high = rates[place], rates[place + 1]
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gain(middle) > 0 else (low, middle)
    return math.sqrt(low * high)


def _notes(traced: Traced, target: Target) -> list[str]:
    notes = [policies.codec_note(target)]
    if traced.alone:
        notes.append(
            "one rank's trace stands for all ranks, and the interval does not contain the error of this"
        )
    ratio, (least, most) = target.rate / traced.rate, VALIDATED
    if not least * (1 - 1e-9) <= ratio <= most * (1 + 1e-9):
        notes.append(
            f"extrapolated: {ratio:.3g} times the traced rate, and {least:g} to {most:g} were validated"
        )
    if target.policy not in REWRITES:
        notes.append("on our engine's schedule, not on the traced program's")
    if target.topology != traced.topology and target.machine is None and target.slower == 1:
        notes.append(
            "computation as traced: ranks that share processors would take longer (--slower, --machine)"
        )
    return [note for note in notes if note]


def about(traced: Traced, errors: Sequence[float]) -> list[str]:
    """Return lines of text about the traces, to be printed before the predictions.

    The lines state the traced run's topology, its link rate, its step time, and the error of its replay.  They also
    name the rules that decided which task waits for a collective (:mod:`harness.whatif.tasks`).  ``errors`` is
    what :func:`check_replay` returned: the relative error of each step's replay.
    """
    seconds = [step.seconds for step in traced.steps]
    origin = "given" if traced.rate_given else "found from the largest collectives"
    median = statistics.median(seconds)
    lines = [
        (
            f"Traced: {len(seconds)} steps of {traced.topology} ranks, {median:.4g} s a step "
            f"({min(seconds):.4g} to {max(seconds):.4g}), at {in_words(traced.rate)} ({origin}). "
            f"Replayed with an error of {statistics.median(map(abs, errors)):.1%}."
        )
    ]
    exposed = statistics.median(joint.replay(step, joint.as_traced(step)).exposed for step in traced.steps)
    lines.append(f"As traced, the rank that waits most waits for messages for {exposed:.3g} s of a step.")
    rules = ", ".join(f"{rule} {count}" for rule, count in sorted(traced.rules.items()))
    lines.append(f"What waits for collectives was found by: {rules}.")
    moved = {rank: offset for rank, offset in traced.offsets.items() if offset}
    if moved:
        rank, offset = max(moved.items(), key=lambda item: abs(item[1]))
        lines.append(f"Clocks of hosts were aligned by collectives, by up to {offset:+.3g} s (rank {rank}).")
    if traced.alone:
        lines.append(
            "One rank's trace stands for all ranks: the time for which it waits for others counts as time of the "
            f"collectives{'' if traced.rate_given else ', and the link may be faster than the rate found'}. No "
            "interval contains this error."
        )
    if len(seconds) < _FEW:
        lines.append(
            f"{len(seconds)} steps are few: trace {_FEW} or more, so that one disturbed step changes little."
        )
    if not traced.rate_given and not any(one.between for step in traced.steps for one in step.collectives):
        lines.append(
            "All ranks are on one node; --traced-ranks-per-node says how many ranks a node of the run had."
        )
    return lines


def in_words(rate: float) -> str:
    """Return a rate in bytes a second as text, such as ``100 Gbit/s``."""
    mbit = rate * 8e-6
    return f"{mbit / 1e3:.4g} Gbit/s" if mbit >= 1e3 else f"{mbit:.4g} Mbit/s"


def row(prediction: Prediction) -> dict[str, Any]:
    """Return a prediction as a dict of numbers and texts by column, for tables, JSON and CSV."""
    target = prediction.target
    return {
        "policy": target.policy,
        "rate_mbit": target.rate * 8e-6,
        "nodes": target.topology.nodes,
        "ranks_per_node": target.topology.ranks_per_node,
        "seconds": prediction.seconds,
        "low_seconds": prediction.low,
        "high_seconds": prediction.high,
        "speed_up": prediction.speed_up,
        "low_speed_up": prediction.low_speed_up,
        "high_speed_up": prediction.high_speed_up,
        "exposed_seconds": prediction.exposed,
        "link_seconds": prediction.link,
        "bound": prediction.bound,
        "break_even_mbit": None if prediction.break_even is None else prediction.break_even * 8e-6,
        "notes": "; ".join(prediction.notes),
    }


def target_topology(traced: Traced, nodes: int | None, ranks_per_node: int | None) -> Topology:
    """Return the topology for which a step is predicted.

    If ``nodes`` or ``ranks_per_node`` is None, the number of the traced run is used.
    """
    return Topology(nodes or traced.topology.nodes, ranks_per_node or traced.topology.ranks_per_node)
