"""Builds a trial's optimizer by name, sets its learning rate, and measures the size of its state."""

from __future__ import annotations

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeGuard, cast

import torch
from torch import Tensor, nn

from harness.errors import Refusal, suggestion
from harness.suites.trial import MUON, Optimizer, Trial
from impl.engine.elementwise_probe import ELEMENTWISE, bare_step, why_not
from impl.engine.muon import Muon, WithAdamW, check_arguments, hidden_parameters, unknown_argument
from impl.engine.unit_planning import GroupOf
from impl.errors import raising
from impl.named_object import NamedObjectError, import_object
from impl.plan.learning_rate import Schedule
from impl.plan.memory import ADAM_BYTES
from impl.plan.owners import MATRICES, owners_of
from impl.zero import Zero, plan_units

_STEP_MUON: Final = bare_step(torch.optim.Muon)  # calls no hooks


def state_bytes_per_element(optimizer: Optimizer) -> int:
    """Return how many bytes of state an optimizer holds for each fp32 element that it updates.

    To measure these bytes, the optimizer takes one step on a tensor of 64 elements.  With Muon nothing is measured, and
    the result is 8.  These are the bytes of AdamW, which keeps two fp32 moments for each element of the parameters that
    Muon does not update.

    Raises:
        Refusal: if the optimizer cannot be built, or cannot take the step.
    """
    if optimizer.orthogonalises:
        _check_muon(optimizer)
        return ADAM_BYTES
    few = nn.Parameter(torch.zeros(64))
    few.grad = torch.zeros_like(few)
    stepping = build(optimizer, [few], unwrapped=True)
    with _raising(optimizer), torch.no_grad():
        stepping.step()
    with _raising(optimizer):  # a state of sparse tensors has no size in bytes
        return state_bytes(stepping, [few]) // few.numel()


def check_elementwise(optimizer: Optimizer) -> None:
    """Check that our engine can use an optimizer, and raise a Refusal if it cannot.

    In our engine, each rank updates only its own shards of the weights.  The engine can use two kinds of optimizers:
    Muon, and every optimizer that updates each element independently of other elements.  The engine itself refuses
    other optimizers too, but only after the ranks have started.
    """
    if optimizer.orthogonalises:
        _check_muon(optimizer)
    elif issubclass(kind := _kind(optimizer), torch.optim.Muon):
        raise Refusal(
            f"optimizer.name = {optimizer.name!r} needs whole matrices, but the engine holds shards: set "
            f"optimizer.name = {MUON!r}, which gathers each matrix on one rank"
        )
    elif kind not in ELEMENTWISE:
        few = nn.Parameter(torch.zeros(8, 8))
        if (why := why_not(build(optimizer, [few], unwrapped=True))) is not None:
            raise Refusal(f"optimizer.name = {optimizer.name!r} {why}")


def group_of(optimizer: Optimizer, model: nn.Module) -> GroupOf | None:
    """Return the function that assigns parameters to optimizer groups (argument of ``impl.zero.shard()``).

    The function is called with a parameter's name and the parameter, and returns the number of its group.  With Muon
    there are two groups: the matrices that Muon updates, and all other parameters.

    Returns:
        The function.  None if the optimizer is not Muon, since all parameters then belong to one group.
    """
    if not optimizer.orthogonalises:
        return None
    hidden = hidden_parameters(model)
    return lambda name, parameter: optimizer.group(name, parameter.shape, hidden=name in hidden)


def muon_arguments(optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the arguments of the trial's optimizer Muon into those of Muon itself and those of its AdamW.

    AdamW updates the parameters that Muon does not update.  Its arguments are the table ``adamw``.

    Returns:
        (arguments of Muon, arguments of AdamW).

    Raises:
        Refusal: if the argument ``adamw`` is no table.
    """
    arguments = dict(optimizer.arguments)
    adamw = arguments.pop("adamw", {})
    if not isinstance(adamw, dict):
        raise Refusal(
            f"optimizer.arguments.adamw = {adamw!r}: expected a table of AdamW's arguments, such as {{ lr = 3e-4 }}"
        )
    if isinstance(steps := arguments.get("ns_steps"), float) and steps.is_integer():
        arguments["ns_steps"] = int(steps)  # a suite's numbers are floats
    return arguments, adamw


def _check_muon(optimizer: Optimizer) -> None:
    """Raise a Refusal if Muon rejects its arguments, or if AdamW rejects the arguments in ``adamw``."""
    muon, adamw = muon_arguments(optimizer)
    with _raising(optimizer):
        check_arguments(muon, adamw)


class UnshardedMuon(WithAdamW):
    """Steps an unsharded model: matrices with ``torch.optim.Muon``, all other parameters with AdamW."""

    def __init__(
        self, optimizer: Optimizer, parameters: Iterable[tuple[str, nn.Parameter]], group_of: GroupOf
    ) -> None:
        groups = defaultdict[int, list[nn.Parameter]](list)
        for name, parameter in parameters:
            groups[group_of(name, parameter)].append(parameter)
        muon, adamw = muon_arguments(optimizer)
        super().__init__([{"params": groups[MATRICES]}], [{"params": groups[0]}], muon, adamw)
        self._muon = torch.optim.Muon([{"params": groups[MATRICES]}], **muon)

    def step_matrices(self, groups: list[dict[str, Any]]) -> None:
        """Update the matrices in ``groups``, which are parameter groups, with one step of ``torch.optim.Muon``."""
        self._muon.param_groups, self._muon.state = groups, self.state
        _STEP_MUON(self._muon)


def of_model(optimizer: Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """Build the trial's optimizer for a model that our engine has not sharded; FSDP2 may have sharded it.

    Raises:
        Refusal: if there is no such optimizer, or its arguments do not fit.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    if (groups := group_of(optimizer, model)) is None:
        return build(optimizer, model.parameters())
    with _raising(optimizer):
        return UnshardedMuon(optimizer, model.named_parameters(), groups)


def owned_shapes(trial: Trial, model: nn.Module) -> list[tuple[int, ...]]:
    """Return the shapes of the matrices that Muon orthogonalises on the busiest rank.

    Our engine divides the matrices among the ranks.  The busiest rank is the one whose matrices need the most
    operations.  With DDP and in a single process, every rank orthogonalises all matrices.  The list is empty if the
    trial does not use Muon.
    """
    if (groups := group_of(trial.optimizer, model)) is None:
        return []
    policy, topology = trial.resolved_policy(), trial.topology()
    if policy is None or trial.host is not None:
        named = model.named_parameters()
        return [tuple(p.shape) for name, p in named if groups(name, p) and p.requires_grad]
    owners = owners_of(policy, topology, plan_units(model, topology, policy, group_of=groups))
    if owners is None:
        return []
    busiest = owners.loads.index(max(owners.loads))
    return [matrix.shape for matrix in owners.matrices if matrix.owner == busiest]


def of_share(
    optimizer: Optimizer, shapes: Sequence[tuple[int, ...]], parameters: Sequence[nn.Parameter]
) -> torch.optim.Optimizer:
    """Build an optimizer for as many elements as one rank updates, so that its step can be timed without a model.

    Args:
        optimizer: Name and arguments of the trial's optimizer.
        shapes: Shapes of the matrices that Muon updates (:func:`owned_shapes`).  This function makes these matrices and
            their gradients, filled with zeros.  Other optimizers ignore the shapes.
        parameters: The rank's other parameters, 1-D.  If the optimizer is Muon, AdamW updates them.

    Raises:
        Refusal: if there is no such optimizer, or its arguments do not fit.
    """
    if not optimizer.orthogonalises:
        return build(optimizer, parameters)
    matrices = [nn.Parameter(torch.zeros(shape, device=parameters[0].device)) for shape in shapes]
    for matrix in matrices:
        matrix.grad = torch.zeros_like(matrix)
    named = [(str(number), each) for number, each in enumerate([*parameters, *matrices])]
    with _raising(optimizer):
        return UnshardedMuon(optimizer, named, lambda _, each: MATRICES if each.dim() == 2 else 0)


def of_engine(optimizer: Optimizer, zero: Zero) -> torch.optim.Optimizer:
    """Build the trial's optimizer for a model that our engine has sharded.

    Raises:
        Refusal: if there is no such optimizer, or its arguments do not fit.
    """
    if not optimizer.orthogonalises:
        return build(optimizer, zero.param_groups())
    muon, adamw = muon_arguments(optimizer)
    with _raising(optimizer):
        return Muon(zero, adamw=adamw, **muon)


def _kind(optimizer: Optimizer) -> type[torch.optim.Optimizer]:
    """Return the class of the trial's optimizer.

    Raises:
        Refusal: if there is no class of this name, or if the class is no optimizer.
    """
    try:
        user_class = import_object(optimizer.name) if ":" in optimizer.name else None
    except NamedObjectError as error:
        raise Refusal(f"optimizer.name = {error}") from error
    kind = user_class or getattr(torch.optim, optimizer.name, None)
    if not _is_optimizer(kind):
        known = [name for name, attribute in vars(torch.optim).items() if _is_optimizer(attribute)]
        unknown = (
            "expected the name of a class in torch.optim, or module:class; torch.optim has no such optimizer"
            f"{suggestion(optimizer.name, known)}"
        )
        derived = "expected a class derived from torch.optim.Optimizer"
        raise Refusal(f"optimizer.name = {optimizer.name!r}: {derived if ':' in optimizer.name else unknown}")
    return kind


def build(
    optimizer: Optimizer, parameters: Iterable[Any], *, unwrapped: bool = False
) -> torch.optim.Optimizer:
    """Build the trial's optimizer.

    Args:
        optimizer: Name and arguments.
        parameters: Parameters or parameter groups.
        unwrapped: Leave out the wrappers that torch puts around ``step`` and ``add_param_group``.  These wrappers
            import torch's compiler, which takes 1.5 s.

    Raises:
        Refusal: if there is no such optimizer, or its arguments do not fit.
    """
    kind = _kind(optimizer)
    if (unknown := unknown_argument(kind, optimizer.arguments)) is not None:
        raise Refusal(f"optimizer.arguments of {optimizer.name}: {unknown}")
    if unwrapped:
        methods = {"add_param_group": inspect.unwrap(kind.add_param_group), "step": bare_step(kind)}
        kind = type(kind.__name__, (kind,), methods)
    with _raising(optimizer):
        instance: torch.optim.Optimizer = kind(parameters, **cast("dict[str, Any]", optimizer.arguments))
    return instance


def set_rates(optimizer: torch.optim.Optimizer, schedule: Schedule | None, step: int) -> None:
    """Set the learning rate of every parameter group for one step of a schedule.

    Args:
        optimizer: The optimizer.
        schedule: Gives the factor by which a group's initial learning rate is multiplied.  If it is None, learning
            rates stay as they are.
        step: Number of the step, counted from 0.
    """
    if schedule is None:
        return
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * schedule.factor(step)


def _is_optimizer(kind: object) -> TypeGuard[type[torch.optim.Optimizer]]:
    return isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)


def state_bytes(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> int:
    """Return how many bytes of state an optimizer holds on this rank for ``parameters``.

    Scalars, such as step counters, are not counted.
    """
    return sum(
        local_part(value).nbytes
        for parameter in parameters
        for value in optimizer.state.get(parameter, {}).values()
        if isinstance(value, Tensor) and value.dim() > 0
    )


def local_part(tensor: Tensor) -> Tensor:
    """Return the local shard of a ``DTensor``, or any other tensor as it is."""
    return cast("Tensor", tensor.to_local()) if hasattr(tensor, "to_local") else tensor


def _raising(optimizer: Optimizer) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that turns any exception in its body into a Refusal.

    The Refusal's message begins with ``optimizer.arguments of`` and the optimizer's name.
    """
    return raising(Refusal, f"optimizer.arguments of {optimizer.name}:")
