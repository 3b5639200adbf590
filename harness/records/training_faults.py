"""Finds faults of a trial's training, such as wrong batches, gradient norms or recorded times.  No torch.

While a rank trains, it notes facts that are measured independently of its record: digests of its batches, losses and
gradient norms.  It also notes the seconds of its steps by a second clock (:mod:`harness.witness.training_checks`).
After the trial, :func:`training_fault` compares the notes of all ranks with each other, with the ranks' records and
with the trial's settings.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from harness.records.trial_record import RankRecord, Record, Validation, slowest_seconds

# Seconds by which a step's recorded time and the witness clock's time of it may differ.  Both come from the same
# readings of the system's clock, but are rounded apart from each other.
_APART: Final = 2e-6
# Time for which a rank may be at work between its timed steps: this share of the steps' time, plus these seconds for
# each step.
_OUTSIDE: Final = (0.03, 0.005)
# A rank must have recorded at least the share _AWAKE of its thread's sleep as waiting for messages.  The recorded time
# may be shorter than this by the sum of two allowances: seconds for the whole trial, and seconds for each step.
_SLEPT: Final = (0.1, 0.01)
# Time for which a rank may sleep beyond its waits for messages: this share of the steps' time, plus these seconds for
# each step.  Longer sleep is a fault only if all ranks have it.  A virtual machine whose host takes its CPUs seems to
# sleep, and so does a rank that reads swapped memory: on a machine with 2 processors and a load of 30, one rank seemed
# to sleep for 0.2 s in 3 steps.
_SLEPT_LONGER: Final = (0.1, 0.01)
_AWAKE: Final = 0.5  # see _SLEPT
# CPU seconds that a step may take on a rank.  They are the sum of a multiple of the model's computation alone, of
# seconds for each byte that the rank sends, and of seconds for each micro-batch.  The numbers under False are for
# policies that encode nothing, those under True for all others.  docs/reference/metrics.md states which shares of these
# limits the ranks of the reference results took, some of them on busy machines.  A test compares these shares with the
# records.
# The seconds for each micro-batch cover costs of messages that do not depend on their size: steps of a tiny model, with
# 4 ranks on 2 processors, needed 0.01 to 0.04 s each, where the model alone needed 0.003 s.
_COMPUTED: Final = {False: (1.5, 12e-9, 0.05), True: (2.0, 20e-9, 0.07)}
# Allowed idle time: a share of the steps' time, plus seconds for each step.  Idle time is the steps' time, less the
# time in which ranks ran or were ready to run (summed over ranks), less the time in which the link was busy.  Without a
# fault it is below -7 % of the steps' time, since ranks compute at the same time as each other and as the link.
_IDLE: Final = (0.05, 0.02)
_WIRE: Final = 1.06  # bytes on the link, with the headers of packets, for each byte that a ledger has
_STEPS: Final = 3  # fewest steps whose median is judged
_SAME_NORM: Final = 1e-4  # relative difference that rounding of sums may leave between two norms
# With local steps, groups of ranks train apart, and outer steps average how far the groups' masters have moved.  Outer
# steps are checked only if the relative error that codecs may cause in this average is below this number.  An engine
# that forgets a momentum of 0.9 causes an error of 0.43 or more, which is then too large to be an error of codecs.
_TELLS: Final = 0.3


@dataclass(slots=True)
class Spent:
    """Wall-clock seconds of one rank's thread, and the seconds in which the thread ran, slept, or waited for a CPU.

    The last three may add up to less than the wall-clock seconds, since not every kernel counts all of them.
    """

    seconds: float = 0.0  # wall-clock time
    ran: float = 0.0  # seconds on a CPU
    slept: float = 0.0  # seconds of waits for anything but a CPU
    stalled: float = 0.0  # seconds in which it was ready to run, but had no CPU

    @property
    def used(self) -> float:
        """Seconds in which the thread ran or slept, that is, without its waits for a CPU."""
        return self.ran + self.slept

    def __add__(self, other: Spent) -> Spent:
        return Spent(
            self.seconds + other.seconds,
            self.ran + other.ran,
            self.slept + other.slept,
            self.stalled + other.stalled,
        )

    def __sub__(self, other: Spent) -> Spent:
        return Spent(
            self.seconds - other.seconds,
            self.ran - other.ran,
            self.slept - other.slept,
            self.stalled - other.stalled,
        )


class Norms(NamedTuple):
    """Norms of one rank's gradients in one step: as the backward passes left them, and as the optimizer used them.

    The gradients are those that the rank's optimizer holds, such as the gradients of the rank's shards.
    """

    reduced: float  # norm of the gradient as the backward passes left it
    stepped: float  # norm of the gradient that the optimizer used
    scale: float  # loss scale by which ``reduced`` is multiplied


class OuterNote(NamedTuple):
    """Some of the master weights of one unit on one rank, before and after an outer step (``policy.local_steps``).

    With local steps, groups of ranks train apart.  In an outer step, the groups average the changes of their master
    weights (the fp32 weights that the optimizer steps).  A unit is a set of parameters that are sent together.  The
    same elements of a unit, at most 64, are noted at every outer step (:mod:`harness.witness.outer_witness`).
    """

    step: int  # index of the step after which the outer step was taken
    unit: str
    before: list[float]  # just before the outer step, after the optimizer's own step
    after: list[float]


class OuterRules(NamedTuple):
    """The trial's settings for outer steps, from which :func:`training_fault` recomputes these steps.

    With ``policy.local_steps``, groups of ranks train apart.  In an outer step, the groups average the changes of their
    masters (the fp32 weights that the optimizer steps) since the last outer step.  SGD with Nesterov momentum then uses
    this average as its gradient, and changes the masters of all groups.
    """

    group: int  # number of ranks in a group; ranks of equal index in their groups hold the same shards
    rate: float  # learning rate of the outer SGD
    momentum: float  # Nesterov momentum of the outer SGD
    # Largest error that codecs may cause in the mean of the groups' movements, relative to these movements.
    error: float


@dataclass(slots=True)
class Checked:
    """What one rank noted while it trained (:mod:`harness.witness.training_checks`), for :func:`training_fault`."""

    kernel: str | None = None  # how the first wrong codec kernel differs from the reference
    wrong: str | None = None  # the first fault that this rank found itself
    losses: list[float] = field(default_factory=list)  # by step: mean of the losses that its passes returned
    # By validation: mean of the losses that its passes returned.
    validated: list[float] = field(default_factory=list)
    warmup: int = 0  # warm-up steps that the trial asks for
    timed: int = 0  # timed steps that the trial asks for
    clip: float | None = None  # norm to which the trial clips the gradient; None without clipping
    replayed: int = 0  # number of the optimizer's steps that were computed again
    # Number of steps whose gradients were compared with the gradients of a rehearsal just before the step.
    linked: int = 0
    # By step: digests of the batches that this rank read, and of the batches that the seed gives the next rank.
    batches: dict[int, str] = field(default_factory=dict)
    of_next_rank: dict[int, str] = field(default_factory=dict)
    # Whether two equal batches are a fault, because they are too unlikely to be a coincidence.
    distinct: bool = False
    norms: dict[int, Norms] = field(default_factory=dict)  # by step, for the steps that the optimizer took
    elements: int = 0  # number of elements that this rank's optimizer steps, padding included; 0 if not known
    trainable: int = 0  # elements of the unsharded model that are trained
    outer: OuterRules | None = None  # what outer steps should do, with local steps
    # By unit: the masters of an :class:`OuterNote`, before training.
    outer_start: dict[str, list[float]] = field(default_factory=dict)
    outer_notes: list[OuterNote] = field(default_factory=list)  # by outer step and unit
    steps: list[Spent] = field(default_factory=list)  # of every step, by a second clock
    # Two parts of the time from the first timed step to the last.  ``between`` is the time outside of steps, checks and
    # validations.  ``checks`` is the time of those checks in and after steps that send no messages.
    between: Spent = field(default_factory=Spent)
    checks: Spent = field(default_factory=Spent)
    seconds: float = 0.0  # seconds of all checks, also in warm-up steps
    costs: dict[str, float] = field(default_factory=dict)  # CPU seconds by check, also in warm-up steps
    # Seconds from the beginning of the first timed step to the end of the last: by the witness clock, which is a second
    # clock around the steps; and at least and at most, by another clock of the system that is read just before and just
    # after each of the two readings of the witness clock.
    laps: float = 0.0
    passed: tuple[float, float] = (0.0, 0.0)
    encodes: bool = False  # whether the policy has codecs other than casts, or a reduction of the user's own
    random: str = ""  # digest of the state of torch's generator when training begins
    waited: float | None = None  # seconds of all steps spent waiting for messages; None for peers
    # Whether the kernel counts the thread's sleep, and the thread sleeps only to wait for messages.
    sleeps_counted: bool = False
    carried: int = 0  # bytes that the transports carried for this rank in the timed steps
    booked: int = 0  # bytes that the rank's ledger counted in the timed steps; must equal ``carried``


def training_fault(
    checked: Sequence[Checked], ranks: Sequence[RankRecord], validations: Sequence[Validation] = ()
) -> str | None:
    """Return a sentence on the first fault of a trial's training; None if there is no fault.

    Args:
        checked: What each rank noted, by rank.
        ranks: Records of the ranks, by rank.
        validations: Validations of the trial.
    """
    return next(_faults(checked, ranks, validations), None)


def _faults(
    checked: Sequence[Checked], ranks: Sequence[RankRecord], validations: Sequence[Validation]
) -> Iterator[str]:
    for rank, (check, record) in enumerate(zip(checked, ranks, strict=True)):
        if check.wrong is not None:
            yield check.wrong
        yield from _wrong_steps(rank, check, record)
        yield from _wrong_seconds(rank, check, record)
    yield from _wrong_clock(checked)
    yield from _wrong_validations(checked, validations)
    yield from _wrong_batches(checked)
    size = len(checked) if checked[0].outer is None else checked[0].outer.group
    for first in range(0, len(checked), size):  # each group with local steps has gradients of its own
        yield from _wrong_norms(checked[first : first + size], ranks[first : first + size], first)
    for first in range(size if checked[0].outer is not None else 0):
        yield from _wrong_outer_steps(checked[first::size], [*range(len(checked))][first::size])
    for rank, check in enumerate(checked):
        if check.carried != check.booked:
            yield (
                f"the transports carried {check.carried} bytes for rank {rank} in the timed steps, but its ledger "
                f"has {check.booked}"
            )
    yield from _little_waiting(checked, ranks)
    states: dict[str, int] = {}
    for rank, check in enumerate(checked):
        if check.random and (other := states.setdefault(check.random, rank)) != rank:
            yield f"rank {rank} begins with the random state of rank {other}: dropout would mask the same units on both"


def _wrong_steps(rank: int, check: Checked, record: RankRecord) -> Iterator[str]:
    """Yield a sentence if a rank's record does not have exactly the steps that the trial asks for, numbered from 0.

    Also yields a sentence for each step whose recorded loss differs from the loss that the rank computed, or whose
    ``warmup`` is wrong.
    """
    if not record.steps:  # generations have no steps
        return
    total = check.warmup + check.timed
    if [step.index for step in record.steps] != [*range(total)]:
        yield f"rank {rank} has {len(record.steps)} steps on record, not the steps 0 to {total - 1}"
    for step, loss in zip(record.steps, check.losses, strict=False):
        if step.warmup != (step.index < check.warmup):
            kinds = ("a timed step", "a warm-up step")
            yield (
                f"step {step.index} of rank {rank} is on record as {kinds[step.warmup]}, but the trial has "
                f"{check.warmup} warm-up steps"
            )
        if not math.isclose(step.loss, loss, rel_tol=1e-6) and math.isfinite(loss):
            yield (
                f"in step {step.index} rank {rank} trained at a loss of {loss:.6f}, but {step.loss:.6f} is on "
                "record"
            )


def _wrong_validations(checked: Sequence[Checked], validations: Sequence[Validation]) -> Iterator[str]:
    """Yield a sentence for each validation with a wrong recorded loss.

    The loss must be the mean over ranks of the losses that the validation's passes returned.
    """
    for number, validation in enumerate(validations):
        losses = [check.validated[number] for check in checked if number < len(check.validated)]
        mean = math.fsum(losses) / max(len(losses), 1)
        if len(losses) != len(checked) or not (
            math.isclose(validation.loss, mean, rel_tol=1e-9) or math.isnan(mean)
        ):
            yield (
                f"the validation after step {validation.step} has a loss of {validation.loss:.6f} on record, but "
                f"{mean:.6f} was computed"
            )


def _wrong_seconds(rank: int, check: Checked, record: RankRecord) -> Iterator[str]:
    """Yield a sentence for each step whose recorded seconds differ from those of a second clock.

    Also yields a sentence if the rank may have done work of its steps outside of the timed steps.  There are two signs:

    - The rank ran or slept for too long between its timed steps.
    - The rank slept for too long in the harness's own checks, although these have nothing to wait for.
    """
    for step, spent in zip(record.steps, check.steps, strict=False):
        if abs(step.total - spent.seconds) > _APART:
            took = f"step {step.index} of rank {rank} is recorded with {step.total:.3f} s"
            wrong = "counts too much" if step.total > spent.seconds else "misses a part of it"
            yield f"{took}, but a second clock around it shows {spent.seconds:.3f} s: the clock {wrong}"
    timed = [spent.seconds for spent in check.steps[check.warmup :]]
    if not timed:
        return
    allowed = _OUTSIDE[0] * math.fsum(timed) + _OUTSIDE[1] * len(timed)
    if check.between.used > allowed:
        yield (
            f"rank {rank} ran for {check.between.ran:.3f} s and slept for {check.between.slept:.3f} s between the "
            f"timed steps, and {allowed:.3f} s of both together are allowed: the clock misses a part of the steps"
        )
    if check.sleeps_counted and check.checks.slept > allowed:
        yield (
            f"rank {rank} slept for {check.checks.slept:.3f} s in checks, which wait for nothing: the clock misses "
            "a part of the steps"
        )


def _wrong_clock(checked: Sequence[Checked]) -> Iterator[str]:
    """Yield a sentence if the second clock, with which recorded seconds are compared, is itself wrong.

    On each rank, the second clock and ``time.monotonic()`` both measured the time from the beginning of the first timed
    step to the end of the last.  It is a fault if the two times differ by more than 3 % plus 0.01 s.
    """
    for rank, check in enumerate(checked):
        least, most = check.passed
        if not 0.97 * least - 0.01 <= check.laps <= 1.03 * most + 0.01:
            yield (
                f"the timed steps and what lies between them took {check.laps:.3f} s on rank {rank}, but another clock "
                f"shows {most:.3f} s"
            )


def _wrong_batches(checked: Sequence[Checked]) -> Iterator[str]:
    """Yield a sentence for each wrong batch that a rank read.

    A batch is wrong if the trial's seed gives the rank another batch in this step.  A batch is also wrong if another
    rank has read an equal batch, or if the same rank has read an equal batch in an earlier step.  If the field
    ``distinct`` is False, equal batches may be a coincidence, and are allowed.
    """
    for rank, check in enumerate(checked):
        drawn = checked[rank - 1].of_next_rank
        for step, digest in check.batches.items():
            if digest != drawn.get(step):
                yield (
                    f"in step {step} rank {rank} read another batch (digest {digest[:12]}) than the seed gives this "
                    f"rank ({drawn.get(step, 'none')[:12]})"
                )
    seen: dict[str, tuple[int, int]] = {}
    for rank, check in enumerate(checked):
        for step, digest in check.batches.items():
            if check.distinct and digest in seen:
                before, other = seen[digest]
                if other == rank:
                    yield f"rank {rank} read in step {step} a batch that it had read in an earlier step, {before}"
                else:
                    yield f"rank {rank} read in step {step} the batch that rank {other} read in step {before}"
            seen[digest] = (step, rank)


def _wrong_outer_steps(checked: Sequence[Checked], ranks: Sequence[int]) -> Iterator[str]:
    """Yield a sentence for each outer step that gave wrong master weights.

    Masters are the fp32 weights that the optimizer steps.  In an outer step, groups of ranks that train apart average
    the changes of their masters since the last outer step.  SGD with Nesterov momentum then uses the average as its
    gradient, and changes the masters of all groups.  The step is wrong in two cases:

    - After the step, the groups hold different masters.
    - The new masters do not follow from the trial's learning rate and momentum.  To check this, the average change is
      computed twice: from the changes that the groups noted, and from the new masters, by solving SGD's formula for its
      gradient.  The two averages may differ only by the error that codecs may cause.  The check is left out if this
      error may be :data:`_TELLS` or more, relative to the changes.

    Changes are counted from the masters that were noted after the previous outer step, so that errors of codecs do not
    add up over outer steps.

    Args:
        checked: Notes of one rank of each group; these ranks hold the same shards.
        ranks: The numbers of these ranks.
    """
    rules, first = checked[0].outer, checked[0]
    if rules is None or not first.outer_start:
        return
    rate, momentum = rules.rate, rules.momentum
    anchors = dict(first.outer_start)
    speeds = {unit: [0.0] * len(values) for unit, values in anchors.items()}
    for notes in zip(*(check.outer_notes for check in checked), strict=True):
        step, unit, _, after = notes[0]
        where = f"after the outer step of unit {unit!r} in step {step}"
        for rank, note in zip(ranks, notes, strict=True):
            if note.after != after:
                yield f"{where} ranks {ranks[0]} and {rank} hold different weights, but groups must agree"
        anchor, speed = anchors[unit], speeds[unit]
        moved = [[a - b for a, b in zip(anchor, note.before, strict=True)] for note in notes]
        mean = [math.fsum(values) / len(values) for values in zip(*moved, strict=True)]
        pulls = [(a - b) / rate for a, b in zip(anchor, after, strict=True)]
        had = [(p - momentum**2 * v) / (1 + momentum) for p, v in zip(pulls, speed, strict=True)]
        scale = math.sqrt(math.fsum(x * x for values in moved for x in values) / len(moved))
        rounding = 2.0**-22 * math.sqrt(math.fsum(a * a for a in anchor)) / rate
        off = math.sqrt(math.fsum((x - y) ** 2 for x, y in zip(had, mean, strict=True)))
        if rules.error < _TELLS and not off <= (rules.error + _SAME_NORM) * scale + rounding:
            yield (
                f"{where} the masters of rank {ranks[0]} are not what outer_rate = {rate:g} and outer_momentum = "
                f"{momentum:g} give: with these, the groups' mean movement has a relative error of "
                f"{off / max(scale, 1e-30):.3f}, of which codecs explain {rules.error:.3f}; was the momentum forgotten?"
            )
        speeds[unit] = [momentum * v + x for v, x in zip(speed, had, strict=True)]
        anchors[unit] = after


def _wrong_norms(checked: Sequence[Checked], ranks: Sequence[RankRecord], start: int) -> Iterator[str]:
    """Yield a sentence for each wrong gradient norm, and for elements or steps that the optimizers left out.

    - All ranks must have recorded the same norm in a step.
    - On each rank, the norm of the gradient that the optimizer used must follow from the reduced gradient that the
      backward passes left.  It must be the norm of the reduced gradient, divided by the loss scale and clipped as the
      trial asks.
    - The optimizers of all ranks together must step all elements that the model trains.
    - A step of the optimizer must be taken by all ranks or by none.

    Args:
        checked: Notes of the ranks that average their gradients with each other.
        ranks: Records of these ranks.
        start: Number of the first of these ranks.
    """
    for by_rank in zip(*(rank.steps for rank in ranks), strict=True):
        norms = [step.gradient_norm for step in by_rank if step.gradient_norm is not None]
        if norms and not max(norms) - min(norms) <= 1e-6 * abs(max(norms)) and math.isfinite(sum(norms)):
            listed = ", ".join(f"{norm:.6g}" for norm in norms)
            yield f"gradient norms of step {by_rank[0].index} differ between ranks: {listed}"
    first = checked[0]
    if not first.elements:
        return
    stepped = sum(check.elements for check in checked)
    if stepped < first.trainable:
        yield (
            f"the optimizers of all ranks step {stepped} elements together, but the model has {first.trainable}: the "
            "remaining elements are never updated"
        )
    copies = stepped // max(first.trainable, 1)  # each element is stepped by so many ranks
    for index in sorted(first.norms):
        found = [check.norms[index] for check in checked if index in check.norms]
        if len(found) != len(checked):
            yield f"only {len(found)} of {len(checked)} ranks took the optimizer's step {index}"
            continue
        scale, clip = found[0].scale, first.clip
        whole = math.sqrt(math.fsum(norm.reduced**2 for norm in found) / copies) / scale
        factor = 1.0 if clip is None else min(1.0, clip / max(whole, 1e-30))
        for rank, norm in enumerate(found, start):
            expected = norm.reduced / scale * factor
            if not abs(norm.stepped - expected) <= _SAME_NORM * expected and math.isfinite(expected):
                asks = (
                    ""
                    if clip is None
                    else f", after clipping the norm over all ranks from {whole:.6g} to {clip:g}"
                )
                yield (
                    f"in step {index} the optimizer of rank {rank} had gradients with a norm of {norm.stepped:.6g}, "
                    f"but its backward passes left {expected:.6g}{asks}"
                )


def _little_waiting(checked: Sequence[Checked], ranks: Sequence[RankRecord]) -> Iterator[str]:
    """Yield a sentence if threads slept in the steps for much longer than their waits for messages explain.

    The time that a rank's thread slept in the steps is compared with two other times of the rank:

    - The recorded waits for messages.  If they are much shorter than the sleep, the record is wrong.
    - The waits for messages that the engine measured.  If they are much shorter than the sleep on all ranks, something
      else, such as a call of sleep(), has slowed the steps.
    """
    longer: list[str] = []
    for rank, check in enumerate(checked):
        count = len(check.steps)
        slept = math.fsum(spent.slept for spent in check.steps)
        if check.sleeps_counted and check.waited is not None:
            total = math.fsum(spent.seconds for spent in check.steps)
            if slept > check.waited + _SLEPT_LONGER[0] * total + _SLEPT_LONGER[1] * count:
                longer.append(
                    f"rank {rank} slept for {slept:.3f} s in {count} steps, but waited for messages for "
                    f"{check.waited:.3f} s: something else made it wait"
                )
        exposed = [step.exposed for step in ranks[rank].steps if step.exposed is not None]
        waited = math.fsum(exposed)
        if check.outer is not None:  # waits for other groups are in the optimizer's seconds
            waited += math.fsum(step.optimizer for step in ranks[rank].steps)
        enough = waited >= _AWAKE * slept - _SLEPT[0] - _SLEPT[1] * count
        if check.sleeps_counted and len(exposed) == count and not enough:
            wait = f"waited {waited:.3f} s for messages in {count} steps"
            yield f"rank {rank} recorded that it {wait}, but its thread slept for {slept:.3f} s in them"
    if longer and len(longer) == len(checked):
        yield longer[0]


class Computed(NamedTuple):
    """CPU seconds that one rank used in its median step, and the limit that these seconds should not exceed."""

    used: float  # median CPU seconds of a step
    # CPU seconds that the model's own computation, the bytes sent and the number of micro-batches explain.
    allowed: float
    alone: float  # CPU seconds of the model and the optimizer alone, without an engine
    sent: float  # bytes that the rank sent in a step


def computed(own: RankRecord, accumulation: int, *, encodes: bool, timed: int) -> Computed | None:
    """Return the CPU seconds of a rank's median step, and the limit that they should not exceed.

    The limit (:data:`_COMPUTED`) follows from the CPU seconds of the model without an engine, the bytes that the rank
    sends and the number of micro-batches.  It is a fault if all ranks exceed their limits (:func:`slowed`).

    Warm-up steps and step 0 are left out of the median.  Step 0 has costs that no later step has, such as imports and
    fresh memory.

    Returns None if fewer than :data:`_STEPS` steps remain, if the rank has no ledger (list of the bytes that it sent),
    or if the model was not timed without an engine.

    Args:
        own: The rank's record.
        accumulation: Number of micro-batches in a step.
        encodes: Whether the policy has codecs other than casts, or a reduction of the user's own.
        timed: Number of timed steps, over which the ledger counts.
    """
    later = [step for step in own.steps if not step.warmup and step.index]
    used = [step.cpu_seconds for step in later if step.cpu_seconds is not None]
    if not own.alone or own.ledger is None or len(used) < _STEPS:
        return None
    alone = max(sample.cpu_seconds for sample in own.alone) * accumulation
    alone += max(sample.optimizer_cpu_seconds for sample in own.alone)
    times, by_byte, constant = _COMPUTED[encodes]
    sent = sum(row.bytes for row in own.ledger) / timed
    allowed = times * alone + constant * accumulation + by_byte * sent
    return Computed(statistics.median(used), allowed, alone, sent)


def slowed(checked: Sequence[Checked], record: Record) -> str | None:
    """Return a sentence if a trial's steps took longer than computation and messages explain; else None.

    Steps took too long in two cases:

    - Every rank whose limit is known used more CPU seconds than this limit (:func:`computed`).  The limit follows
      mainly from the time of the same model without an engine, which the trial measures too.
    - All ranks and the link between nodes were idle together for too long (:func:`_idle`).  The time in which the link
      was busy is computed from the bytes sent and the link's measured rate.  A rank that is ready to run, but gets no
      CPU, is not idle.

    Nothing is checked in two cases:

    - ``sleeps_counted`` is False on a rank: either the kernel does not count the sleep of the rank's thread, or the
      thread may sleep for other reasons than messages, for example to wait for a GPU.
    - ``cluster.inner_rate`` limits the rate of messages inside nodes.

    Args:
        checked: What each rank noted, by rank.
        record: The trial's record.
    """
    trial = record.trial
    accumulation, cluster = trial.get("accumulation", 1), trial.get("cluster", {})
    if not all(check.sleeps_counted for check in checked) or cluster.get("inner_rate") is not None:
        return None
    by_rank = [
        computed(own, accumulation, encodes=check.encodes, timed=check.timed)
        for check, own in zip(checked, record.ranks, strict=True)
    ]
    known = {rank: found for rank, found in enumerate(by_rank) if found is not None}
    # On a busy machine single ranks take several times the CPU seconds for the same work.
    if known and all(found.used > found.allowed for found in known.values()):
        rank, found = min(known.items(), key=lambda item: item[1].used - item[1].allowed)
        return (
            f"rank {rank} computed for {found.used:.3f} s in half of its steps or more, but the model alone takes "
            f"{found.alone:.3f} s and the rank sent {found.sent:.0f} bytes a step: at most {found.allowed:.3f} s "
            "is explained, and every other rank exceeds its limit by more"
        )
    return _idle(checked, record)


def _idle(checked: Sequence[Checked], record: Record) -> str | None:
    """Return a sentence if all ranks and the link were idle together for longer than :data:`_IDLE` allows; else None.

    Only the timed steps count.  Returns None too if a rank has no ledger (list of the bytes that it sent), or if the
    link's rate is not known.
    """
    total, count = math.fsum(slowest_seconds(record)), checked[0].timed
    rates = [] if record.link is None else [*record.link.probed_mbit, *record.link.calibrated_mbit]
    by_node: dict[int, int] = defaultdict(int)
    messages = 0
    for own in record.ranks:
        if own.ledger is None:
            return None
        rows = [row for row in own.ledger if row.link == "inter"]
        by_node[own.node] += sum(row.bytes for row in rows)
        messages = max(messages, sum(row.messages for row in rows))
    busiest = max(by_node.values(), default=0)
    if busiest and not rates:
        return None  # nobody knows how fast the link is
    wire = _WIRE * 8 * busiest / (min(rates) * 1e6) if busiest else 0.0
    wire += messages * (record.trial.get("cluster", {}).get("latency") or 0.0) / 1e3
    timed = [spent for check in checked for spent in check.steps[check.warmup :]]
    awake = math.fsum(spent.seconds - spent.slept for spent in timed)
    awake += 0.0 if record.processor_use is None else record.processor_use.steal
    idle = total - awake - wire
    if idle <= _IDLE[0] * total + _IDLE[1] * count:
        return None
    return (
        f"the timed steps took {total:.3f} s, in which all ranks together ran or were ready to run for {awake:.3f} s "
        f"and the link was busy for at most {wire:.3f} s: nothing explains {idle:.3f} s of them"
    )
