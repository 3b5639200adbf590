"""Computes two lower bounds on a step's time: from a simulation of its messages, and from its CPU seconds.

:mod:`impl.plan.timeline` simulates in which order the units (groups of parameters) are gathered, computed and reduced.
Both bounds need the seconds of computation.  Trials of the workload ``train`` measure these separately, by running the
model without messages (:mod:`harness.measure.compute_alone`).  For trials without this measurement, a rank's seconds of
computation are the seconds of its step minus the seconds in which it waited for messages.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable
from typing import Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from impl.codecs.codec import CodecError
from impl.plan.prefetch_schedule import Schedule, small_units
from impl.plan.timeline import Collective, Load, TimedHop, in_chunks, least_pass_seconds
from impl.policy.shard_layout import UnitGeometry, chunked
from report.data.frames import Frames

BITS_PER_MBIT: Final = 1e6
_COMPUTED: Final = ("forward", "backward", "rest")  # parts of a step
_Seconds = NDArray[np.float64]


def schedule_seconds(frames: Frames, steps: pd.Series[int]) -> pd.Series[float]:
    """Return, by id of the trial, the seconds that a step takes in the simulated schedule.

    A step is simulated for each row of :func:`computations`, that is, for each rank and each timed step (or each
    sample, if computation was measured separately).  Of each step or sample, only the seconds of the slowest rank are
    used.  The trial's value is the median of these seconds.  The value is NaN for trials whose schedule cannot be
    simulated, such as trials of DDP.  Trials whose seconds of computation are not known are left out.

    ``steps`` is the number of timed steps of each trial, by id.
    """
    achieved = frames.finished.set_index("id")["achieved_mbit"]
    sent = frames.bytes[frames.bytes["source"].eq("ledger") & frames.bytes["link"].eq("inter")]
    by = ["id", "unit", "phase", "purpose"]
    busiest = sent.groupby([*by, "node"])["bytes"].sum().groupby(level=by).max()
    sent_a_step = defaultdict[str, dict[Hashable, float]](dict)
    for key, size in zip(busiest.index.tolist(), busiest, strict=True):
        identity, *place = key
        sent_a_step[identity][tuple(place)] = size / steps.loc[identity]
    seconds = {}
    computed = computations(frames).astype(dict.fromkeys(_COMPUTED, float))
    for identity, of_trial in computed.groupby("id"):
        if not np.isnan(parts := of_trial[[*_COMPUTED]].to_numpy()).any():
            bound = _bound(frames, str(identity), achieved[identity], sent_a_step[str(identity)], parts)
            seconds[identity] = pd.Series(bound, index=of_trial["index"]).groupby(level=0).max().median()
    return pd.Series(seconds, dtype=float)


def timed(steps: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of ``steps`` that are not warm-ups.

    ``steps`` has one row per step (``Frames.steps``) or per decoded token (``Frames.tokens``).
    """
    return steps[~steps["warmup"].astype(bool)]


def computations(frames: Frames) -> pd.DataFrame:
    """Return the seconds in which each rank computes in a step, without waiting for messages.

    Some trials measure computation separately, in samples that send no messages.  For such a trial the table has one
    row for each rank and sample, and ``alone`` is true.  For any other trial it has one row for each rank and timed
    step, and ``alone`` is false.  ``index`` is the number of the sample or step.  ``forward``, ``backward`` and
    ``rest`` are the seconds of the parts of a step, and ``cpu_seconds`` the CPU seconds of the whole step; each may be
    NaN.
    """
    alone = frames.alone
    passes = alone["id"].map({identity: trial.accumulation for identity, trial in frames.trial_of.items()})
    by_itself = alone[["id"]].assign(
        index=alone.groupby(["id", "rank"]).cumcount(),
        forward=alone["forward"] * passes,
        backward=alone["backward"] * passes,
        rest=alone["optimizer"],
        cpu_seconds=alone["cpu_seconds"] * passes + alone["optimizer_cpu_seconds"],
        alone=True,
    )
    steps = timed(frames.steps[~frames.steps["id"].isin(alone["id"])])
    rest = steps["total"] - steps["forward"] - steps["backward"]
    in_steps = steps[["id", "index"]].assign(
        forward=steps["forward"] - pd.to_numeric(steps["exposed_forward"]),
        backward=steps["backward"] - pd.to_numeric(steps["exposed_backward"]),
        rest=rest - before_training(steps, "exposed_generate", "exposed_score"),
        cpu_seconds=pd.to_numeric(steps["cpu_seconds"]).astype(float),
        alone=False,
    )
    tables = [table for table in (by_itself, in_steps) if len(table)]
    return pd.concat(tables, ignore_index=True) if tables else in_steps


def before_training(steps: pd.DataFrame, *names: str) -> pd.Series[float]:
    """Return the sum of the columns ``names`` for each row of ``steps``; empty cells count as 0.

    The columns hold seconds of generating or scoring.  Only workload ``rlhf`` has these phases, which precede training
    in each of its steps.
    """
    sums: pd.Series[float] = steps[[*names]].apply(pd.to_numeric).fillna(0.0).sum(axis=1)
    return sums


def processor_seconds(frames: Frames) -> pd.Series[float]:
    """Return, by id of the trial, the seconds in which the trial's CPUs, all busy, do the computation of a step.

    This is the sum of all ranks' CPU seconds, divided by the number of CPUs that the ranks share.  A value is the
    median over samples or timed steps (:func:`computations`).  It is NaN on GPUs, for ranks that may run on several
    machines, and for records without CPU seconds.
    """
    computed = computations(frames).astype({"cpu_seconds": float})
    of_steps = computed.groupby(["id", "index"])["cpu_seconds"].agg(lambda ranks: ranks.sum(skipna=False))
    of_trials = of_steps.groupby("id").agg(lambda steps: steps.median(skipna=False))
    return of_trials / frames.finished.set_index("id")["processors"].reindex(of_trials.index)


def _bound(
    frames: Frames, identity: str, mbit: float, sent: dict[Hashable, float], parts: _Seconds
) -> _Seconds | float:
    """Return the seconds that a step of a trial takes in the simulated schedule.

    The step is simulated with each of the n rows that :func:`computations` has for the trial.

    Args:
        frames: The records.
        identity: Id of the trial.
        mbit: Rate of the link in Mbit/s.
        sent: Bytes that the busiest node sends in one step, by (unit, phase, purpose).
        parts: Seconds of computation in the forward pass, the backward pass and the rest of a step, (n, 3).

    Returns:
        An array (n,).  Instead of the array, a single NaN is returned in each of these cases:

        * A library such as DDP trains the model, or the workload is not ``train``.
        * The trial sends bytes over a link of unknown rate.
        * The policy changes ``reduce`` or ``chunks`` during training.
        * The messages are sent over NCCL, and a codec for weights is not installed here.
    """
    trial, rate = frames.trial_of[identity], mbit * BITS_PER_MBIT
    policy = trial.resolved_policy()
    if policy is None or trial.workload != "train" or (sent and math.isnan(rate)):
        return math.nan
    # ``sent`` has means over all steps.  They fit no single phase, if phases send in different orders.
    if len({(phase.reduce, phase.chunks) for phase in policy.phases}) > 1:
        return math.nan
    units, topology, small = frames.geometries(identity), trial.topology(), frozenset[int]()
    if trial.cluster.transport == "nccl":
        try:
            small = small_units(policy, topology, units)
        except CodecError:
            return math.nan
    policy = policy.phases[0]
    passes, axes = trial.accumulation, policy.reduce_axes(topology)
    between = any(topology.crosses(axis) for axis, _ in axes[1:])
    sizes = [size for _, size, _ in frames.units[identity]]
    # A user's codec may not be installed here, and its block size is then unknown.  The suite's common alignment is a
    # multiple of it.
    grain = trial.policy.align if policy.own_codecs else policy.grain
    forward, backward, rest = parts.T

    def seconds_of(unit: UnitGeometry, phase: str, *purposes: str) -> float:
        nbytes = sum(sent.get((unit.name, phase, purpose), 0) for purpose in purposes)
        return 8 * nbytes / passes / rate if nbytes else 0.0

    def gather(unit: UnitGeometry, phase: str) -> Collective:
        return Collective(hops=(TimedHop(adapter=seconds_of(unit, phase, "weights", "persistent")),))

    def reduce(unit: UnitGeometry) -> Collective:
        """Return the simulated hops (exchanges of messages) that reduce a unit's gradients, with their seconds.

        If the policy reduces by a ring, each step of the ring is a hop.  Otherwise each chunk of the gradients has one
        hop between nodes.  If the policy reduces inside nodes first, each chunk also has a hop inside the node, before
        its hop between nodes.  The hop inside the node is taken to need no time.
        """
        adapter = seconds_of(unit, "backward", "gradients")
        if policy.reduce == "ring":
            steps = max(1, topology.world - 1)
            return Collective(hops=(TimedHop(adapter=adapter / steps),) * steps)
        lengths = [end - start for start, end in chunked(unit.piece, policy.chunks, grain)]
        hops = [[TimedHop(adapter=adapter * length / unit.piece) for length in lengths]]
        return Collective(hops=in_chunks([[TimedHop(adapter=0.0) for _ in lengths]] * between + hops))

    loads = [
        Load(
            forward=forward * (size / sum(sizes) / passes),
            backward=backward * (size / sum(sizes) / passes),
            gather=gather(unit, "forward"),
            regather=gather(unit, "backward"),
            reduce=reduce(unit),
        )
        for unit, size in zip(units, sizes, strict=True)
    ]
    schedule = Schedule.for_units(policy, units, small)
    seconds: _Seconds = passes * least_pass_seconds(schedule, loads) + rest
    return seconds
