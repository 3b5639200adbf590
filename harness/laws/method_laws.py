"""Tests a user's own gradient reduction, on random topologies and gradients, with ranks that run as threads.

A *duty* is a property that every reduction must have (:class:`MethodDuty`).  A *law* is a property that a reduction may
promise in addition (:class:`~impl.policy.own_method.MethodLaw`).  A *claim* is a duty, or a law that was promised.  To
test a claim, the engine's own code runs the user's reduction and counts its messages.  The claims of a user's gather of
weights are tested by :mod:`harness.laws.gather_laws`.
"""

from __future__ import annotations

import contextlib
import enum
import math
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Final, NamedTuple

import hypothesis
import torch
from hypothesis.errors import Flaky, NoSuchExample
from torch import Tensor

from harness.laws import gather_laws
from harness.laws.gather_laws import GatherDuty, GatherLaw
from harness.laws.method_cases import Case, Row, Violation, cases, check_booked, check_same, on_ranks
from harness.laws.searching import search_settings
from impl.comm.mesh import Mesh
from impl.comm.wire import Wire
from impl.errors import raised
from impl.plan.traffic import Book, Tag
from impl.policy.own_method import MethodLaw, MethodUnit, OwnMethod, role_of
from impl.transport.threads import TurnError
from impl.unit.own_reduction import OwnReduction

_REPEATED: Final = 128  # reductions of the same gradients for UNBIASED
_SIGMAS: Final = 6.0  # a mean further away than so many standard errors is a bias
_ROUNDING: Final = (
    1e-4  # differences of a mean in fp32 that rounding explains, relative to the largest magnitude
)


class MethodDuty(enum.Enum):
    """A property that every user-defined reduction must have; the member's value states it."""

    MEAN = "finish() returns finite elements (S,) fp32, whatever the topology, the shapes and the gradients"
    ADVANCE = "the mean does not depend on how often advance() is called"
    RESUME = (
        "a new object that loads the state of an old one returns what the old one would return, bit by bit"
    )
    APART = "the mean of a unit does not depend on other units"
    KEEP = "later reductions do not change a mean that finish() has returned"
    UNSTARTED = "finish() without start() raises an error"
    BYTES = "the ledger has the messages that bytes() declares"


Claim = MethodDuty | MethodLaw | GatherDuty | GatherLaw


class Outcome(NamedTuple):
    """The result of trying one claim (a duty, or a promised law, of a user's method) on many cases."""

    cases: int  # number of cases on which the claim was tried
    case: Case | None  # the smallest case found that breaks the claim; None if the claim holds
    violation: str = ""  # what is wrong in this case
    hung: bool = False  # whether a rank did not return from the method, which ended the search


def claims_of(own: OwnMethod) -> list[Claim]:
    """Return all claims to test for a user's method: its duties, then the laws that it promises.

    The duty ``BYTES`` is left out if the method does not declare, with a function ``bytes()``, how much it sends.
    """
    if role_of(own.definition) == "gather":
        return [*gather_laws.claims_of(own)]
    counts = callable(getattr(own.definition, "bytes", None))
    duties = [duty for duty in MethodDuty if duty is not MethodDuty.BYTES or counts]
    promised = own.laws - {MethodLaw.SETTLES}
    return [*duties, *(law for law in MethodLaw if law in promised)]


def falsify(own: OwnMethod, claim: Claim, *, examples: int, seed: int) -> Outcome:
    """Try a claim on random cases, and look for the smallest case on which the claim does not hold.

    A claim is a duty, or a promised law, of a user's method.  If a rank does not return from the method within
    :data:`harness.laws.method_cases.SECONDS`, the search ends, since each further case is likely to take as long.

    Args:
        own: The user's method, with its arguments.
        claim: The duty or law to try.
        examples: Number of random cases.  ``UNBIASED`` is tried on a tenth as many cases.
        seed: Decides which cases are drawn.
    """
    tried, broken, hung = 0, list[tuple[Case, str]](), list[Case]()

    def breaks(case: Case) -> bool:
        nonlocal tried
        if hung:
            return case == hung[0]
        tried += 1
        try:
            violated = violation_of(own, claim, case)
        except TurnError as error:
            hung.append(case)
            violated = (
                f"method {own} on rank {error.rank}, unit {case.geometry().name!r}: has run for {error.seconds:.0f} s "
                f"without waiting for a message, in {error.where}"
            )
        if violated is not None:
            broken.append((case, violated))
        return violated is not None

    costly = claim.name == MethodLaw.UNBIASED.name
    drawn = cases(["fp32", "bf16"]) if isinstance(claim, GatherDuty | GatherLaw) else cases()
    settings = search_settings(examples, costly=costly)
    with contextlib.suppress(NoSuchExample, Flaky):
        hypothesis.find(drawn, breaks, settings=settings, random=Random(seed))
    return Outcome(tried, *broken[-1], hung=bool(hung)) if broken else Outcome(tried, None)


def violation_of(own: OwnMethod, claim: Claim, case: Case) -> str | None:
    """Try a claim (a duty, or a promised law, of a user's method) on one case, and return what is wrong.

    Returns None if the claim holds.

    Raises:
        TurnError: If a rank does not return from the method in time.
    """
    try:
        if isinstance(claim, MethodDuty | MethodLaw):
            _TRIALS[claim](own, case)
        else:
            gather_laws.TRIALS[claim](own, case)
    except Violation as violation:
        return str(violation)
    except (KeyboardInterrupt, TurnError):
        raise
    except BaseException as error:
        return f"raised {raised(error)}"
    return None


# Reductions on all ranks


def _reduce(reduction: OwnReduction, gradient: Tensor, advances: int) -> Tensor:
    reduction.start(gradient)
    for _ in range(advances):
        reduction.post_next_hop()
    return reduction.finish()


def _means(
    own: OwnMethod, case: Case, steps: int, *, advances: int | None = None, resumed: int | None = None
) -> list[list[Tensor]]:
    """Reduce the gradients of ``steps`` steps on all ranks, and return for each rank the mean (S,) of each step.

    Args:
        own: The user's method, with its arguments.
        case: The ranks, the unit and the gradients.
        steps: Number of steps.
        advances: Number of calls of ``advance()`` in each reduction; if None, ``case.advances``.
        resumed: Index of a step (from 0) before which training is resumed: the method's object is replaced by a new
            object, which loads the old object's state.  None to keep the same object in all steps.
    """
    geometry = case.geometry()

    def body(mesh: Mesh, wire: Wire) -> list[Tensor]:
        reduction, means = OwnReduction(own, geometry, wire), list[Tensor]()
        for step in range(steps):
            if step == resumed:
                state = reduction.state()
                reduction.drain()
                reduction = OwnReduction(own, geometry, wire)
                reduction.load(state)
            gradient = case.gradient(geometry, step, mesh.rank)
            means.append(_reduce(reduction, gradient, case.advances if advances is None else advances))
        reduction.drain()
        return means

    return on_ranks(case, body)


# Claims


def _mean(own: OwnMethod, case: Case) -> None:
    _means(own, case, 3)  # OwnReduction checks types, shapes and values


def _advance(own: OwnMethod, case: Case) -> None:
    others = (case.advances + 1) % 4
    what = f"after {others} calls of advance() in each step"
    instead = f"after {case.advances} calls"
    check_same(_means(own, case, 3, advances=others), _means(own, case, 3), what, instead)


def _resume(own: OwnMethod, case: Case) -> None:
    resumed = 1 + case.seed % 2
    check_same(
        _means(own, case, 4, resumed=resumed),
        _means(own, case, 4),
        f"if step {resumed} is resumed from a state",
        "if no step is resumed",
    )


def _apart(own: OwnMethod, case: Case) -> None:
    """Check that a unit's means stay the same if a second unit is reduced at the same time.

    The calls of both units alternate, as in the engine.
    """
    geometry, other = case.geometry(), case.geometry("another")

    def body(mesh: Mesh, wire: Wire) -> list[Tensor]:
        first, second, means = (
            OwnReduction(own, geometry, wire),
            OwnReduction(own, other, wire),
            list[Tensor](),
        )
        for step in range(3):
            first.start(case.gradient(geometry, step, mesh.rank))
            first.post_next_hop()
            second.start(case.gradient(other, step, mesh.rank))
            first.post_next_hop()
            second.post_next_hop()
            means.append(first.finish())
            second.finish()
        first.drain()
        second.drain()
        return means

    alone = _means(own, case, 3, advances=2)
    what, instead = "while another unit is reduced too", "if the unit is reduced alone"
    check_same(on_ranks(case, body), alone, what, instead)


def _keep(own: OwnMethod, case: Case) -> None:
    """Check that later reductions do not change the tensor in which the method returned an earlier mean."""
    geometry = case.geometry()

    def body(mesh: Mesh, wire: Wire) -> tuple[list[Tensor], list[Tensor]]:
        reduction, kept, copies = OwnReduction(own, geometry, wire), list[Tensor](), list[Tensor]()
        for step in range(3):
            reduction.start(case.gradient(geometry, step, mesh.rank))
            mean = reduction.mean_of_method()
            kept.append(mean)
            copies.append(mean.clone())
        reduction.drain()
        return kept, copies

    pairs = on_ranks(case, body)
    kept, copies = [kept for kept, _ in pairs], [copies for _, copies in pairs]
    check_same(kept, copies, "after later reductions", "before them")


def _unstarted(own: OwnMethod, case: Case) -> None:
    geometry = case.geometry()

    def body(_: Mesh, wire: Wire) -> bool:
        reduction = OwnReduction(own, geometry, wire)
        try:
            reduction.mean_of_method()
        except Exception:
            return True
        return False

    if not all(on_ranks(case, body)):
        raise Violation(
            "finish() of a new object returned a mean, although start() was not called; expected an error"
        )


def _bytes(own: OwnMethod, case: Case) -> None:
    geometry = case.geometry()

    def body(mesh: Mesh, wire: Wire) -> Row:
        reduction, book = OwnReduction(own, geometry, wire), Book(case.topology, mesh.rank)
        for step in range(2):
            _reduce(reduction, case.gradient(geometry, step, mesh.rank), case.advances)
            for message in reduction.messages(case.topology) or ():
                book.method_message(Tag("backward", "gradients", geometry.name), message)
        reduction.drain()
        return wire.ledger.rows(), book.sent

    check_booked(on_ranks(case, body), "gradients", "2 reductions")


def _same_on_all_ranks(own: OwnMethod, case: Case) -> None:
    """Check that all ranks compute the same mean, bit by bit.

    The same gradients are reduced twice, in two layouts:

    - In the case's own layout.  Usually each rank then keeps only its own shard of the mean, so that no two ranks have
      an element in common that could be compared.
    - In a layout in which every rank keeps the whole mean.

    Each element of a rank's shard must equal the same element of two means from the second layout: the mean that this
    rank keeps, and the mean that rank 0 keeps.
    """
    geometry, every = case.geometry(), _means(own, replace(case, shared="none"), 2)
    for rank, means in enumerate(_means(own, case, 2)):
        start, _ = geometry.bounds(rank)
        for step, mean in enumerate(means):
            for otherwise, other in (
                ("rank 0 finds {} if each rank keeps the whole mean", every[0][step]),
                ("finds {} if it keeps the whole mean", every[rank][step]),
            ):
                for low, high in (geometry.part(slot, rank) for slot in geometry.slots):
                    theirs = other[start + low : start + high]
                    if not torch.equal(mean[low:high], theirs):
                        at = int((mean[low:high] != theirs).nonzero()[0])
                        raise Violation(
                            f"in step {step}, rank {rank} finds {mean[low + at]:.9g} for element {start + low + at} of "
                            f"the unit, but {otherwise.format(f'{theirs[at]:.9g}')}"
                        )


def _zero(own: OwnMethod, case: Case) -> None:
    for rank, (mean,) in enumerate(_means(own, replace(case, gradients="zero"), 1)):
        if bool(mean.any()):
            raise Violation(
                f"the gradients of all ranks are zeros, but on rank {rank} the mean has an element "
                f"{mean[mean.nonzero()[0]].item():.9g}: expected a mean of zeros"
            )


def _exact(own: OwnMethod, case: Case) -> None:
    _within(own, case, lambda _: 0.0, per_piece=False)


def _exact_at_full_rank(own: OwnMethod, case: Case) -> None:
    unit = MethodUnit.of(case.geometry(), 0)
    arguments = dict(own.arguments)
    arguments |= own.definition.full_rank(unit, **arguments)
    _exact(replace(own, arguments=tuple(arguments.items())), case)


def _bound(own: OwnMethod, case: Case) -> None:
    _within(own, case, own.error_bound, per_piece=True)


def _within(own: OwnMethod, case: Case, bound_of: Callable[[MethodUnit], float], *, per_piece: bool) -> None:
    """Check that the mean of a method's first reduction is close to the exact mean of the gradients.

    Each element may be wrong by ``bound_of(unit) * m``, and in addition by what rounding in fp32 explains.
    ``bound_of`` returns the error that the method promises, as a share of ``m``.  To compute ``m``, take the largest
    magnitude of each rank's gradient, and average these numbers over ranks.  For example, if the largest magnitudes of
    two ranks are 1 and 3, ``m`` is 2.

    With ``per_piece``, the gradients (P,) are cut into as many equal pieces as there are ranks, and ``m`` is computed
    for each piece separately, because each rank reduces one piece.
    """
    geometry = case.geometry()
    exact, world = case.mean(geometry, 0), case.topology.world
    gradients = torch.stack([case.gradient(geometry, 0, rank) for rank in range(world)]).double()
    parts = gradients.abs().view(world, world if per_piece else 1, -1).amax(2).mean(0)
    largest = parts.repeat_interleave(geometry.padded // len(parts))
    for rank, (mean,) in enumerate(_means(own, case, 1)):
        start, end = geometry.bounds(rank)
        unit = MethodUnit.of(geometry, rank)
        allowed = (bound_of(unit) + _ROUNDING) * largest[start:end] + 1e-30
        for low, high in (geometry.part(slot, rank) for slot in geometry.slots):
            error = (mean.double() - exact[start:end]).abs()[low:high]
            if bool((wrong := error > allowed[low:high]).any()):
                at = low + int(wrong.nonzero()[0])
                raise Violation(
                    f"on rank {rank}, element {at} of the shard is {mean[at]:.9g}, but the exact mean is "
                    f"{exact[start + at]:.9g}: the promised error is at most {allowed[at]:.3g}"
                )


def _unbiased(own: OwnMethod, case: Case) -> None:
    geometry, exact = case.geometry(), case.mean(case.geometry(), 0)

    def body(mesh: Mesh, wire: Wire) -> Tensor:
        reduction, gradient = OwnReduction(own, geometry, wire), case.gradient(geometry, 0, mesh.rank)
        means = [_reduce(reduction, gradient.clone(), case.advances) for _ in range(_REPEATED)]
        reduction.drain()
        return torch.stack(means).double()

    for rank, means in enumerate(on_ranks(case, body)):
        start, end = geometry.bounds(rank)
        deviation = means.std(0) / math.sqrt(_REPEATED)
        largest = float(exact.abs().max())
        allowed = _SIGMAS * deviation + _ROUNDING * largest + 1e-30
        used = torch.zeros(end - start, dtype=torch.bool)
        for low, high in (geometry.part(slot, rank) for slot in geometry.slots):
            used[low:high] = True
        wrong = ((means.mean(0) - exact[start:end]).abs() > allowed) & used
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0])
            raise Violation(
                f"on rank {rank}, element {at} of the shard is {means[:, at].mean():.9g} on average over {_REPEATED} "
                f"reductions, but the exact mean of all ranks' gradients is {exact[start + at]:.9g}: the method is "
                "biased"
            )


_TRIALS: Final[dict[MethodDuty | MethodLaw, Callable[[OwnMethod, Case], None]]] = {
    MethodDuty.MEAN: _mean,
    MethodDuty.ADVANCE: _advance,
    MethodDuty.RESUME: _resume,
    MethodDuty.APART: _apart,
    MethodDuty.KEEP: _keep,
    MethodDuty.UNSTARTED: _unstarted,
    MethodDuty.BYTES: _bytes,
    MethodLaw.SAME_ON_ALL_RANKS: _same_on_all_ranks,
    MethodLaw.ZERO: _zero,
    MethodLaw.EXACT: _exact,
    MethodLaw.EXACT_AT_FULL_RANK: _exact_at_full_rank,
    MethodLaw.BOUND: _bound,
    MethodLaw.UNBIASED: _unbiased,
}
