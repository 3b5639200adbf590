"""Tests a user's own gather of weights, with ranks that run as threads.

Every such gather has the duties of :class:`GatherDuty`, and may promise laws of :class:`GatherLaw` as well.  Each duty
and law is tried by real gathers, for forward and for backward passes, of weights that change from step to step.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from harness.laws.method_cases import Case, Row, Violation, check_booked, check_same, on_ranks
from impl.codecs.reference import DTYPES
from impl.comm.mesh import Mesh
from impl.comm.wire import Wire
from impl.plan.traffic import Book, Tag
from impl.policy.own_method import GatherInfo, MethodUnit, OwnMethod
from impl.policy.shard_layout import UnitGeometry
from impl.unit.own_gather import OwnGather

_REPEATED: Final = 128  # gathers of the same weights for UNBIASED
_SIGMAS: Final = 6.0  # a mean further away than so many standard errors is a bias
_ROUNDING: Final = 1e-4  # differences that rounding in fp32 explains, relative to the largest magnitude


class GatherDuty(enum.Enum):
    """A property that every user-defined gather of weights must have; the member's value states it."""

    WHOLE = (
        "finish() returns finite elements (P,) in the type of gathered weights, on any topology and shapes"
    )
    ADVANCE = "the weights do not depend on how often advance() is called"
    RESUME = (
        "a new object that loads the state of an old one returns what the old one would return, bit by bit"
    )
    REPEAT = "while weights have not changed, passes of the same kind get the same weights"
    APART = "the weights of a unit do not depend on other units"
    UNSTARTED = "finish() without start() raises an error"
    BYTES = "the ledger has the messages that bytes() declares"


class GatherLaw(enum.Enum):
    """A property that a user-defined gather of weights may promise; the member's value states it.

    The members have the same names as those of :class:`~impl.policy.own_method.MethodLaw`.
    """

    SAME_ON_ALL_RANKS = "every rank finds the same weights, bit by bit"
    ZERO = "a new object gathers weights of zeros as zeros"
    EXACT = "the result is the weights, cast to the type of gathered weights, bit by bit"
    EXACT_AT_FULL_RANK = "with the arguments of full_rank(), the result is the weights, bit by bit"
    BOUND = "the error of each element of a new object's result is within error_bound"
    UNBIASED = "the mean of repeated gathers of the same weights is these weights"
    SETTLES = "after settles_after() gathers of weights that do not change, the result is these weights, up to rounding"


# For each gather: the step whose weights are gathered, and the information that the method gets in start().
Calls = Sequence[tuple[int, GatherInfo]]


def training(steps: int) -> Calls:
    """Return the gathers of ``steps`` training steps: in each step, one for forward and one for backward.

    Each gather is a pair (step, :class:`GatherInfo`).  The weights of this step are gathered, and the GatherInfo is
    passed to the user's method.
    """
    calls = list[tuple[int, GatherInfo]]()
    for step in range(steps):
        calls.append((step, GatherInfo("forward", "stepped" if step else "loaded", step)))
        calls.append((step, GatherInfo("backward", "unchanged", step)))
    return calls


def _repeated(times: int) -> Calls:
    """Return ``times`` forward gathers of the same weights, announced as if an optimizer stepped between them.

    Each gather is a pair (0, :class:`GatherInfo`), since the weights are always those of step 0.  The first GatherInfo
    tells the user's method that the weights have been loaded.  Each later GatherInfo says that an optimizer has
    stepped, although the weights have not changed.
    """
    return [(0, GatherInfo("forward", "stepped" if number else "loaded", number)) for number in range(times)]


def _gather(gather: OwnGather, case: Case, geometry: UnitGeometry, call: tuple[int, GatherInfo]) -> Tensor:
    step, info = call
    gather.start(case.weights(geometry, step)[gather.unit.own], info)
    for _ in range(case.advances):
        gather.advance()
    return gather.finish().clone()


def _wholes(own: OwnMethod, case: Case, calls: Calls, *, resumed: int | None = None) -> list[list[Tensor]]:
    """Run the gathers ``calls`` on all ranks, and return for each rank the gathered weights (P,) of each call.

    If ``resumed`` is a number, the user's method is resumed once, as from a checkpoint: before call number ``resumed``,
    counted from 0, a new object of the user's class loads the state of the old object.  The new object makes this call
    and all later calls.
    """
    geometry, dtype = case.geometry(), DTYPES[case.compute]

    def body(_: Mesh, wire: Wire) -> list[Tensor]:
        gather, wholes = OwnGather(own, geometry, wire, dtype), list[Tensor]()
        for number, call in enumerate(calls):
            if number == resumed:
                state = gather.state()
                gather.drain()
                gather = OwnGather(own, geometry, wire, dtype)
                gather.load(state)
            wholes.append(_gather(gather, case, geometry, call))
        gather.drain()
        return wholes

    return on_ranks(case, body)


# Claims


def _whole(own: OwnMethod, case: Case) -> None:
    _wholes(own, case, training(2))  # OwnGather checks types, shapes and values


def _advance(own: OwnMethod, case: Case) -> None:
    other = replace(case, advances=(case.advances + 1) % 4)
    what = f"after {other.advances} calls of advance() in each gather"
    instead = f"after {case.advances} calls"
    found, expected = _wholes(own, other, training(2)), _wholes(own, case, training(2))
    check_same(found, expected, what, instead, "the weights of gather")


def _resume(own: OwnMethod, case: Case) -> None:
    resumed, calls = 1 + case.seed % 4, training(3)
    what = f"if gather {resumed} is resumed from a state"
    instead = "if no gather is resumed"
    found, expected = _wholes(own, case, calls, resumed=resumed), _wholes(own, case, calls)
    check_same(found, expected, what, instead, "the weights of gather")


def _repeat(own: OwnMethod, case: Case) -> None:
    again = [(0, GatherInfo(phase, "unchanged", 0)) for phase in ("backward", "forward", "backward")]
    for rank, wholes in enumerate(_wholes(own, case, [*training(1)[:1], *again])):
        for number in (0, 1):
            first, later = wholes[number], wholes[number + 2]
            if not torch.equal(first, later):
                at = int((first != later).nonzero()[0])
                raise Violation(
                    f"on rank {rank}, element {at} is {first[at]:.9g} in gather {number}, and {later[at]:.9g} in "
                    f"gather {number + 2} for the same kind of pass, although the weights have not changed"
                )


def _apart(own: OwnMethod, case: Case) -> None:
    """Check that a unit's gathered weights stay the same if a second unit is gathered at the same time.

    The calls of both units alternate, as in the engine.
    """
    geometry, other, dtype = case.geometry(), case.geometry("another"), DTYPES[case.compute]

    def body(_: Mesh, wire: Wire) -> list[Tensor]:
        first, second = OwnGather(own, geometry, wire, dtype), OwnGather(own, other, wire, dtype)
        wholes = list[Tensor]()
        for step, info in training(2):
            first.start(case.weights(geometry, step)[first.unit.own], info)
            second.start(case.weights(other, step)[second.unit.own], info)
            first.advance()
            wholes.append(first.finish().clone())
            second.finish()
        first.drain()
        second.drain()
        return wholes

    alone = _wholes(own, replace(case, advances=1), training(2))
    what, instead = "while another unit is gathered too", "if the unit is gathered alone"
    check_same(on_ranks(case, body), alone, what, instead, "the weights of gather")


def _unstarted(own: OwnMethod, case: Case) -> None:
    geometry = case.geometry()

    def body(_: Mesh, wire: Wire) -> bool:
        gather = OwnGather(own, geometry, wire, DTYPES[case.compute])
        try:
            gather.finish()
        except Exception:
            return True
        return False

    if not all(on_ranks(case, body)):
        raise Violation(
            "finish() of a new object returned weights, although start() was not called; expected an error"
        )


def _bytes(own: OwnMethod, case: Case) -> None:
    geometry, calls = case.geometry(), training(2)

    def body(mesh: Mesh, wire: Wire) -> Row:
        gather = OwnGather(own, geometry, wire, DTYPES[case.compute])
        book = Book(case.topology, mesh.rank)
        for call in calls:
            _gather(gather, case, geometry, call)
            info = call[1]
            for message in gather.messages(case.topology, info) or ():
                book.method_message(Tag(info.phase, "weights", geometry.name), message)
        gather.drain()
        return wire.ledger.rows(), book.sent

    check_booked(on_ranks(case, body), "weights", "the forward and backward gathers of 2 steps")


def _same_on_all_ranks(own: OwnMethod, case: Case) -> None:
    first, *others = _wholes(own, case, training(2))
    for rank, wholes in enumerate(others, 1):
        for number, (whole, other) in enumerate(zip(wholes, first, strict=True)):
            for slot in case.geometry().slots:
                mine, theirs = (each[slot.offset : slot.end] for each in (whole, other))
                if not torch.equal(mine, theirs):
                    at = int((mine != theirs).nonzero()[0])
                    raise Violation(
                        f"in gather {number}, rank {rank} finds {mine[at]:.9g} for element {slot.offset + at} of the "
                        f"unit, and rank 0 finds {theirs[at]:.9g}"
                    )


def _zero(own: OwnMethod, case: Case) -> None:
    geometry = case.geometry()
    for rank, (whole,) in enumerate(_wholes(own, replace(case, gradients="zero"), training(1)[:1])):
        for slot in geometry.slots:
            if bool((values := whole[slot.offset : slot.end]).any()):
                raise Violation(
                    f"on rank {rank}, a weight of 0 is gathered as {values[values.nonzero()[0]].item():.9g}"
                )


def _exact(own: OwnMethod, case: Case) -> None:
    calls = training(2)
    _near(own, case, calls, [0.0] * len(calls))


def _exact_at_full_rank(own: OwnMethod, case: Case) -> None:
    arguments = dict(own.arguments)
    arguments |= own.definition.full_rank(MethodUnit.of(case.geometry(), 0), **arguments)
    _exact(replace(own, arguments=tuple(arguments.items())), case)


def _bound(own: OwnMethod, case: Case) -> None:
    bound = own.error_bound(MethodUnit.of(case.geometry(), 0))
    _near(own, case, training(1)[:1], [bound + _ROUNDING])


def _settles(own: OwnMethod, case: Case) -> None:
    times = int(own.definition.settles_after(MethodUnit.of(case.geometry(), 0), **dict(own.arguments)))
    _near(own, case, _repeated(times), [math.inf] * (times - 1) + [_ROUNDING])


def _near(own: OwnMethod, case: Case, calls: Calls, bounds: Sequence[float]) -> None:
    """Run the gathers ``calls`` on all ranks, and check that the gathered weights are near the exact weights.

    ``bounds`` has a number b for each gather:

    - If b is 0, the gathered weights must equal the exact weights, cast to the compute type.
    - If b is infinite, the gathered weights are not checked.
    - Otherwise, the error of an element may be at most ``(b + eps) * largest``.  ``eps`` is the relative precision of
      the compute type, and ``largest`` the largest magnitude in the shard that has the element.
    """
    geometry, dtype = case.geometry(), DTYPES[case.compute]
    for rank, wholes in enumerate(_wholes(own, case, calls)):
        for number, (whole, (step, _), bound) in enumerate(zip(wholes, calls, bounds, strict=True)):
            exact = case.weights(geometry, step)
            if bound == 0.0:
                exact, allowed = exact.to(dtype).double(), torch.zeros(len(exact))
            else:
                largest = exact.abs().view(-1, geometry.shard).amax(1).double()
                cast = torch.finfo(dtype).eps
                allowed = (largest * (bound + cast) + 1e-30).repeat_interleave(geometry.shard)
            for slot in geometry.slots:
                part = slice(slot.offset, slot.end)
                error = (whole[part].double() - exact[part].double()).abs()
                if bool((wrong := error > allowed[part]).any()):
                    at = slot.offset + int(wrong.nonzero()[0])
                    raise Violation(
                        f"on rank {rank}, element {at} of gather {number} is {whole[at]:.9g}, and the weight is "
                        f"{exact[at]:.9g}: they differ by more than {allowed[at]:.3g}"
                    )


def _unbiased(own: OwnMethod, case: Case) -> None:
    geometry = case.geometry()
    exact = case.weights(geometry, 0).double()
    largest = float(exact.abs().max())
    for rank, wholes in enumerate(_wholes(own, case, _repeated(_REPEATED))):
        found = torch.stack(wholes).double()
        deviation = found.std(0) / math.sqrt(_REPEATED)
        allowed = _SIGMAS * deviation + (_ROUNDING + torch.finfo(DTYPES[case.compute]).eps) * largest + 1e-30
        wrong = (found.mean(0) - exact).abs() > allowed
        for slot in geometry.slots:
            if bool((bad := wrong[slot.offset : slot.end]).any()):
                at = slot.offset + int(bad.nonzero()[0])
                raise Violation(
                    f"on rank {rank}, element {at} is {found[:, at].mean():.9g} on average over {_REPEATED} gathers, "
                    f"and the weight is {exact[at]:.9g}"
                )


TRIALS: Final[dict[GatherDuty | GatherLaw, Callable[[OwnMethod, Case], None]]] = {
    GatherDuty.WHOLE: _whole,
    GatherDuty.ADVANCE: _advance,
    GatherDuty.RESUME: _resume,
    GatherDuty.REPEAT: _repeat,
    GatherDuty.APART: _apart,
    GatherDuty.UNSTARTED: _unstarted,
    GatherDuty.BYTES: _bytes,
    GatherLaw.SAME_ON_ALL_RANKS: _same_on_all_ranks,
    GatherLaw.ZERO: _zero,
    GatherLaw.EXACT: _exact,
    GatherLaw.EXACT_AT_FULL_RANK: _exact_at_full_rank,
    GatherLaw.BOUND: _bound,
    GatherLaw.UNBIASED: _unbiased,
    GatherLaw.SETTLES: _settles,
}


def claims_of(own: OwnMethod) -> list[GatherDuty | GatherLaw]:
    """Return the properties to check for a user's gather: the duties of every gather, then the promised laws.

    The duty ``BYTES`` is left out if the method does not declare, with a function ``bytes()``, how much it sends.
    """
    counts, promised = callable(getattr(own.definition, "bytes", None)), {law.name for law in own.laws}
    duties = [duty for duty in GatherDuty if duty is not GatherDuty.BYTES or counts]
    return [*duties, *(law for law in GatherLaw if law.name in promised)]
