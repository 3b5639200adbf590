"""ZeRO over any torch module: ``shard(model, ...)`` changes it in place.

Hooks report events of the model's units to the :class:`~impl.schedule.Schedule` and carry out its
actions.  Nothing here knows ZeRO++'s techniques by name: they are values of the policy.

The training loop gains one line::

    zero = shard(model, mesh=mesh, policy=preset("zeropp"))
    optimizer = torch.optim.AdamW(zero.param_groups())
    ...
    loss.backward()
    zero.finish_backward()
    optimizer.step()
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from impl import ops, state
from impl.blocks import GroupOf, check_shapes, drafts_of, find_blocks, geometry_of, plan_units
from impl.construction import give_values
from impl.cut import taken_over
from impl.errors import ZeroError
from impl.external import external_to
from impl.homes import homes_of
from impl.mesh import Mesh
from impl.module_buffers import ModuleBuffers
from impl.nested import cast_tensors, memory_of, tensors_in
from impl.noise import Clock
from impl.offload import MEMORY, Host
from impl.policy import Offload, Policy
from impl.pool import Meter, Pool, Reserve
from impl.reductions import Reductions
from impl.reference import DTYPES
from impl.same_start import check_same_start
from impl.saved import SavedTensors
from impl.scaling import LossScaler, Stepped
from impl.schedule import MOST_AHEAD, Action, Schedule
from impl.shared import Shared
from impl.tiers import CopyKey, realised, tiers_of
from impl.topology import Axis
from impl.traffic import NORM_BYTES, Phase, kept_units
from impl.unit import Unit
from impl.watch import watch_optimizers
from impl.wire import Tag, Wire

__all__ = ["Zero", "ZeroError", "find_blocks", "plan_units", "shard"]


def shard(
    model: nn.Module,
    *,
    mesh: Mesh,
    policy: Policy,
    wire: Wire | None = None,
    blocks: Sequence[nn.Module] | None = None,
    group_of: GroupOf | None = None,
    seed: int = 0,
    initialise: Callable[[nn.Module], None] | None = None,
) -> Zero:
    """Shard ``model`` in place over all ranks of ``mesh``; all ranks must call it.

    Args:
        model: with the same architecture and values on every rank (:mod:`impl.same_start` compares those that
            are whole); each rank keeps its own slice of them.  What :class:`~impl.construction.Init` cut is
            taken over as it is; a model on the meta device is given its values block by block.
        mesh: the ranks.
        policy: what is sent, held and computed.
        wire: what sends; a plain one by default.
        blocks: modules that are gathered and released as a whole; by default the children of the
            outermost ``ModuleList`` and ``Sequential``, cut to the policy's ``largest_unit``.
        group_of: optimizer group of a parameter by name (weight decay, learning rate).
        seed: of stochastic codecs; the same on all ranks.
        initialise: gives a module of a model on the meta device the values of its own parameters and
            buffers; ``reset_parameters()`` by default.

    Raises:
        PolicyError: if the policy does not fit the topology.
        GeometryError: if a unit would be padded too much.
        ZeroError: for what is no policy or mesh, lazy modules without shapes, blocks that overlap or are
            not in the model, parameters that cannot be sharded, or values that differ between ranks.
    """
    if not isinstance(policy, Policy):
        raise ZeroError(
            f"policy is a {type(policy).__name__}: expected an impl.policy.Policy, as preset() gives it, or "
            "the .policy of a recipe"
        )
    if not isinstance(mesh, Mesh):
        raise ZeroError(f"mesh is a {type(mesh).__name__}: expected an impl.mesh.Mesh of the ranks")
    check_shapes(model)
    policy.check(mesh.topology)
    for device in {mesh.device, MEMORY} if policy.offload != Offload() else {mesh.device}:
        ops.prepare(device)
    wire = wire if wire is not None else Wire(mesh)
    if blocks is None:
        blocks = find_blocks(model, most=policy.memory.largest_unit)
    give_values(model, blocks, mesh, policy, initialise)
    drafts = drafts_of(model, blocks, group_of, policy)
    geometries = [geometry_of(draft, mesh.topology, policy) for draft in drafts]
    check_same_start(mesh.rank, mesh.topology.world, dict(model.named_parameters()))
    meter = Meter()
    pool = Pool(DTYPES[policy.compute], mesh.device, meter, "local_gradients")
    weights = Reserve(DTYPES[policy.compute], mesh.device, meter, "gathered")
    shared = Shared(wire, policy, meter, Clock(seed), pool, weights, Host(mesh.device, meter))
    casts = any(p.dtype != DTYPES[policy.compute] for draft in drafts for p in draft.parameters)
    external = list(external_to(model))
    units = [
        Unit(
            geometry,
            draft.parameters,
            draft.holders,
            shared,
            tier,
            cut=taken_over(geometry, draft.parameters, wire),
        )
        for draft, geometry, tier in zip(
            drafts, geometries, tiers_of(policy.offload, geometries), strict=True
        )
    ]
    for unit in sorted(units, key=lambda unit: -unit.geometry.padded):
        unit.reserve()  # the largest first, so that each arena is made once
    _settle(units, wire, kept_units(policy, geometries))
    zero = Zero(model, units, [draft.module for draft in drafts], shared, casts_inputs=casts)
    unit_of = {
        id(parameter): unit
        for draft, unit in zip(drafts, units, strict=True)
        for parameter in draft.parameters
    }
    for module, parameter in external:
        if id(parameter) not in unit_of:
            raise ZeroError(
                f"an external parameter of shape {tuple(parameter.shape)} is registered for "
                f"{type(module).__name__}, but is not a parameter of the model"
            )
        zero.register_external(module, unit_of[id(parameter)])
    return zero


def _settle(units: Sequence[Unit], wire: Wire, kept: frozenset[int]) -> None:
    """Give homes in shared memory to the units whose weights may stay there as they arrive.

    Units that stay gathered from forward to backward have none: they would keep others out of it.
    """
    along: dict[Axis, list[Unit]] = {}
    item = DTYPES[units[0].policy.compute].itemsize if units else 0
    for index, unit in enumerate(units):
        axis = None if index in kept else unit.shared_axis()
        if axis is not None:
            along.setdefault(axis, []).append(unit)
    for axis, sharing in along.items():
        numbers = homes_of([unit.geometry.outer for unit in sharing])
        lengths = [0] * (max(numbers) + 1)
        for unit, number in zip(sharing, numbers, strict=True):
            lengths[number] = max(lengths[number], unit.geometry.padded * item)
        homes = wire.homes(axis, lengths)
        for unit, number in zip(sharing, numbers, strict=True):
            unit.live_at(homes, number)


class Zero:
    """The engine of one sharded model on one rank; made by :func:`shard`.

    Attributes:
        units: the root's first, then in model order.
        wire: with the ledger.
        policy: what is sent, held and computed.
        scaler: the loss scale.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        modules: Sequence[nn.Module],
        shared: Shared,
        *,
        casts_inputs: bool,
    ) -> None:
        self.model, self.units = model, list(units)
        self.wire, self.policy = shared.wire, shared.policy
        self.scaler = LossScaler(shared.policy.loss_scale)
        self._meter, self._clock, self._host = shared.meter, shared.clock, shared.host
        self._weights, self._under_way = shared.weights, shared.under_way
        self._casts_inputs = casts_inputs  # the model was given in another type than it computes in
        self._module_buffers = ModuleBuffers(model, shared.wire)
        self._accumulating = False  # this pass adds to local gradients and reduces nothing
        self._passes = 0  # backward passes so far
        self._unused: set[int] = set()  # masters, by id(), that no optimizer has stepped since
        self._of_module: dict[nn.Module, list[int]] = {}
        for index, module in enumerate(modules):
            self._of_module.setdefault(module, []).append(index)
        self._kept = kept_units(self.policy, [unit.geometry for unit in units])
        outer = tuple(self._of_module.get(model, ()))
        inner = tuple(i for i in range(len(units)) if i not in outer)
        self._schedule = self._scheduled(inner, outer)
        self._seen: list[int] | None = []  # units in the order they ran; None once it is known
        self._calls: dict[nn.Module, int] = {}  # forward calls whose backward is to come
        self._escaped: set[int] = set()  # units in use outside of their modules, in this forward pass
        self._running = 0  # forward calls of hooked modules under way
        self._external: dict[nn.Module, list[int]] = {}  # units that a module uses beside its own
        self._brought: list[list[int]] = []  # of those, what calls under way have gathered
        self._saved = SavedTensors()
        self._called_alone: nn.Module | None = None
        self._in_backward = False
        self._reductions = Reductions(
            self.units, self._schedule.reduction_order, self.policy.memory.reduce_bucket
        )
        self._unfinished = False
        for module in {model: None, **dict.fromkeys(modules)}:
            # A compiler computes what lies between the hooks; traced, they would be what they did once.
            before = torch.compiler.disable(self._pre_forward)  # type: ignore[no-untyped-call]
            after = torch.compiler.disable(self._post_forward)  # type: ignore[no-untyped-call]
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            module.register_forward_hook(after, with_kwargs=True, always_call=True)
        model.register_load_state_dict_pre_hook(_refuse_load(weakref.ref(self)))  # type: ignore[no-untyped-call]
        clears = weakref.WeakMethod(self._zero_grad)
        for module in {model: None, **dict.fromkeys(modules)}:
            module.__deepcopy__ = _refuse_copy  # type: ignore[assignment]  # found by copy.deepcopy()
        model.zero_grad = lambda set_to_none=True: (clears() or _gone)(set_to_none)  # type: ignore[method-assign]
        for index, unit in enumerate(self.units):
            unit.used_outside = self._user(index)
            if unit.geometry.trainable:
                for number, member in enumerate(unit.members):
                    for leaf in (member.parameter, member.stand_in):
                        hook = self._collector(index, number, outside=leaf is member.stand_in)
                        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # asks for no values
                            leaf.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        watch_optimizers(self, self.units)

    # Training

    def param_groups(self, options: Mapping[int, Mapping[str, Any]] | None = None) -> list[dict[str, Any]]:
        """The fp32 masters of this rank, for any elementwise ``torch.optim`` optimizer.

        Args:
            options: optimizer options of each group, by the number that ``group_of`` gave.

        Returns:
            One dict per group with elements on any rank: ``params``, 1-D fp32 tensors (possibly
            none here), and the group's options.  A group of which some masters are offloaded is two dicts
            on a GPU, one a device: torch steps a list of one device by fused or foreach kernels.

        Raises:
            ZeroError: for options that are no table of groups.
        """
        given: Any = {} if options is None else options
        if not isinstance(given, Mapping) or not all(isinstance(one, Mapping) for one in given.values()):
            raise ZeroError(
                "param_groups(options=...): expected a table of each group's options by its number, as "
                '{0: {"lr": 1e-3}}'
            )
        numbers = sorted({slot.spec.group for unit in self.units for slot in unit.geometry.slots})
        groups = []
        for number in numbers:
            of_device: dict[torch.device, list[Tensor]] = {}
            for unit in self.units:
                for group, master in unit.owned.masters:
                    if group == number:
                        of_device.setdefault(master.device, []).append(master)
            groups += [
                {"params": masters, **given.get(number, {})} for masters in of_device.values() or ([],)
            ]
        return groups

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Backward passes inside add their gradients up locally; the next one outside reduces the sum.

        Raises:
            ZeroError: if the policy reduces every micro-batch.
        """
        self.accumulate(on=True)
        try:
            yield
        finally:
            self.accumulate(on=False)

    def accumulate(self, *, on: bool) -> None:
        """From here on backward passes add up locally, or reduce; see :meth:`accumulating`.

        Raises:
            ZeroError: if the policy reduces every micro-batch, or for what is neither True nor False.
        """
        if not isinstance(on, bool):
            raise ZeroError(f"accumulate(on={on!r}): expected True or False")
        if on and self.policy.reduces_each_micro_batch:
            raise ZeroError(
                f"accumulating() at stage {self.policy.stage}, which reduces each micro-batch into shards: "
                "set the policy's reduce_every to 'step', and have memory for a whole local gradient"
            )
        self._accumulating = on

    def finish_backward(self) -> None:
        """Send what has not been sent, wait for all reductions, release all weights.

        After it the masters' gradients hold the mean over ranks, added to what they held.  A
        parameter that no loss reached has a mean of zero, not none: whether another rank's loss
        reached it is not known without asking, so adaptive optimizers see a zero there.

        Inside :meth:`accumulating` nothing is sent.

        Raises:
            ZeroError: without a backward pass before.
        """
        if not self._unfinished:
            raise ZeroError("finish_backward() without a backward pass before it")
        if self._accumulating:
            for unit in self.units:
                unit.local.end_pass()
        else:
            self._reductions.start_all()
        self._reductions.finish()
        with contextlib.ExitStack() as ending:
            ending.callback(self._end_backward)
            ending.callback(_release, self.units)
        if self.policy.order_every and self._passes % self.policy.order_every == 0:
            self.wire.check_order()

    def _end_backward(self) -> None:
        for unit in self.units:
            unit.owned.land()
        self._weights.trim()
        self._calls.clear()
        self._in_backward = self._unfinished = False
        self._clock.next_micro_batch()
        self._unused.update(id(master) for unit in self.units for _, master in unit.owned.masters)
        self._passes += 1

    def drop_gradients(self) -> None:
        """Forget local gradients that have not been reduced: of a failed pass, or of :meth:`accumulating`.

        The errors that gradient codecs carry go too: a failed pass may have left some.  After a pass that
        KeyboardInterrupt left, of which torch tells no hook, the engine is outside of passes again.
        """
        self._running = 0
        self._brought.clear()
        if self._saved.active:
            self._saved.end()
        self._called_alone = None
        self._reductions.drop_failed()
        for unit in self.units:
            unit.local.drop()
            unit.averaging.clear_feedback()

    def step(self, *optimizers: torch.optim.Optimizer, max_norm: float | None = None) -> Stepped:
        """Unscale the loss's scale away, clip, and step; or skip the step on all ranks after an overflow.

        For losses that were multiplied by ``scaler.scaled(loss)``.

        Args:
            optimizers: over :meth:`param_groups`; with a loss scale all that hold masters with gradients,
                since unscaling and overflow are of all of them together.
            max_norm: largest global 2-norm of the mean gradient; None does not clip.

        Raises:
            LossScaleError: for an overflow at the smallest dynamic scale.
            ZeroError: if a loss scale is set and an optimizer is missing.
        """
        if self.policy.loss_scale is not None:
            held = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
            masters = [m for unit in self.units for _, m in unit.owned.masters if m.grad is not None]
            missing = sum(id(master) not in held for master in masters)
            if missing:
                raise ZeroError(
                    f"step() of optimizers that lack {missing} of {len(masters)} masters with gradients: "
                    "with a loss scale, give all optimizers to one step()"
                )
        return self.scaler.step(self, optimizers, max_norm)

    def grad_norm(self) -> Tensor:
        """() fp64 global 2-norm of the mean gradient; NaN and infinity included.

        All ranks must call it: each sends its sum of squares, summed in rank order, so that all
        have the same bits.  Offloaded gradients are summed where they lie, on the host.

        Raises:
            ZeroError: before :meth:`finish_backward`.
        """
        self.check_finished("grad_norm()")
        device = self.wire.mesh.device
        sums: dict[torch.device, Tensor] = {}
        for unit in self.units:
            for gradient in unit.owned.own_gradients():
                square, place = gradient.double().square().sum(), gradient.device
                sums[place] = sums[place] + square if place in sums else square
        total = torch.zeros((), dtype=torch.float64, device=device)
        for part in sums.values():
            total = total + part.to(device)
        world = self.wire.mesh.topology.world_axis
        exchange = self.wire.all_gather(world, NORM_BYTES, Tag("step", "control"))
        exchange.send.copy_(total.view(1).view(torch.uint8))
        exchange.post()
        squares = exchange.wait().contiguous().view(torch.float64).view(-1)
        exchange.close()
        norm = torch.zeros_like(total)
        for square in squares:
            norm = norm + square
        return norm.sqrt()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their global 2-norm is at most ``max_norm``.

        Returns:
            () fp64 norm before scaling.  A norm that is not finite makes the gradients NaN, as
            ``torch.nn.utils.clip_grad_norm_`` does.

        Raises:
            ZeroError: with a loss scale, whose gradients are unscaled and clipped in :meth:`step`.
        """
        if self.policy.loss_scale is not None:
            raise ZeroError("clip_grad_norm_() of scaled gradients: give max_norm to step() instead")
        norm = self.grad_norm()
        if self.policy.feedback is not None:  # looking waits for the device
            self._forget_overflow(norm)
        self.scale_gradients((max_norm / (norm + 1e-6)).clamp(max=1.0).float())
        return norm

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply the masters' gradients, where they are there."""
        factors: dict[torch.device, float | Tensor] = {}  # a tensor is read from its device once
        for unit in self.units:
            for _, master in unit.owned.masters:
                if master.grad is None:
                    continue
                device = master.grad.device
                if device not in factors:
                    factors[device] = factor.to(device) if isinstance(factor, Tensor) else factor
                master.grad.mul_(factors[device])

    def overflowed(self) -> bool:
        """Whether any rank's gradient holds a NaN or an infinity; the same answer on all ranks.

        If so, the errors that gradient codecs carry are forgotten: they are of gradients that are not
        used.
        """
        return self._forget_overflow(self.grad_norm())

    def _forget_overflow(self, norm: Tensor) -> bool:
        """Whether ``norm`` is not finite; then no codec carries an error over."""
        overflowed = not bool(torch.isfinite(norm))
        if overflowed:
            self.forget_overflow()
        return overflowed

    def forget_overflow(self) -> None:
        """Drop the errors that codecs carry: they are of gradients that are not used."""
        for unit in self.units:
            unit.averaging.clear_feedback()

    def _zero_grad(self, set_to_none: bool) -> None:
        """What ``model.zero_grad()`` means: the gradients are the masters'."""
        for unit in self.units:
            for _, master in unit.owned.masters:
                if set_to_none:
                    master.grad = None
                elif master.grad is not None:
                    master.grad.zero_()

    # State

    def weights_changed(self) -> None:
        """Call after writing masters by hand: what was gathered of them is no longer true.

        Optimizer steps and :meth:`load_full_state_dict` do it themselves.
        """
        for unit in self.units:
            unit.weights_changed()

    def optimizer_stepped(self, masters: Iterable[Tensor]) -> None:
        """An optimizer that holds ``masters`` has stepped; called by itself, from the watch.

        Several optimizers that step after one backward pass are one step.  Frozen weights did not change.
        """
        if self._clock.micro_batch:
            self._clock.next_step()
        self._unused.difference_update(map(id, masters))
        for unit in self.units:
            if unit.geometry.trainable:
                unit.weights_changed()

    def communication_state(self) -> dict[str, Tensor]:
        """What this rank's codecs depend on beside weights (:func:`impl.state.communication_state`)."""
        return state.communication_state(self.units, self._clock, self.wire, self.policy)

    def load_communication_state(self, given: Mapping[str, Tensor]) -> None:
        """Take over what :meth:`communication_state` gave on the same rank.

        Raises:
            ZeroError: if it is of another run, or not whole; nothing is changed then.
        """
        state.load_communication_state(self.units, self._clock, self.wire, self.policy, given)

    @property
    def unused_gradients(self) -> int:
        """Masters of this rank whose gradient waits for its optimizer's step."""
        masters = [master for unit in self.units for _, master in unit.owned.masters]
        return sum(master.grad is not None and id(master) in self._unused for master in masters)

    @property
    def clock(self) -> Clock:
        """What stochastic codecs and feedback go by."""
        return self._clock

    def make_buffers_equal(self) -> None:
        """Bring the model's persistent buffers together, as before a forward pass; all ranks must call it."""
        self._module_buffers.make_equal()

    def full_state_dict(self) -> dict[str, Tensor]:
        """The unsharded model's state: fp32 parameters and buffers by their original names.

        All ranks must call it, and all get it.
        """
        self.make_buffers_equal()
        return state.full_state_dict(self.model, self.units)

    def load_full_state_dict(self, given: Mapping[str, Tensor]) -> None:
        """Overwrite weights and buffers with those of the unsharded model.

        Raises:
            ZeroError: for missing, unexpected or misshapen entries, naming the first; while parameters are
                seen whole.
        """
        self.check_hidden("load_full_state_dict()")
        for unit in self.units:
            unit.release()
        state.load_full_state_dict(self.model, self.units, given)

    @property
    def buffer_bytes(self) -> int:
        """Of the model's persistent buffers, which are kept equal on all ranks."""
        return self._module_buffers.nbytes

    def memory(self) -> dict[str, int]:
        """Most bytes that this rank's engine has held, by part (keys of ``traffic.memory``)."""
        return dict(self._meter.peak)

    def copied(self) -> dict[CopyKey, int]:
        """Bytes copied between host and device so far (as ``traffic.predict_copies`` foresees)."""
        return dict(self._host.copied)

    def _offloaded(self) -> dict[str, Any]:
        """For the record: the shares that whole units come to, and what the host's memory is here."""
        tiers = [unit.owned.tier for unit in self.units]
        shares = realised(self.policy, tiers, [unit.geometry for unit in self.units])
        return {**dataclasses.asdict(shares), "memory": self._host.nature}

    def describe(self) -> dict[str, Any]:
        """Algorithms, transports and kernels that ran, for the record."""
        device = self.wire.mesh.device
        warning = ops.warning_of(device)
        return {
            "stage": self.policy.stage,
            "group": self.policy.group_ranks(self.wire.mesh.topology),
            "gather": self.policy.gather,
            "reduce": self.policy.reduce,
            "transports": self.wire.describe(),
            "kernels": ops.kernels_of(device, [self.policy.weights, *self.policy.gradients]),
            **({} if warning is None else {"kernels_warning": warning}),
            **({} if self.policy.offload == Offload() else {"offload": self._offloaded()}),
            **({} if self.policy.loss_scale is None else {"loss_scale": self.scaler.state_dict()}),
        }

    # Events

    def _scheduled(self, order: Iterable[int], outer: tuple[int, ...]) -> Schedule:
        sizes = [unit.geometry.padded for unit in self.units]
        limits = self.policy.memory
        return Schedule(
            sizes,
            tuple(order),
            outer,
            limits.prefetch,
            limits.max_live,
            self._kept,
            in_model_order=self.policy.stage < 3,
        )

    def _phase(self) -> Phase:
        if self._in_backward:
            return "backward"
        return "forward" if torch.is_grad_enabled() else "evaluate"

    def _carry_out(self, actions: Iterable[Action], phase: Phase) -> None:
        for action in actions:
            unit = self.units[action.unit]
            match action.kind:
                case "gather":
                    # Units gathered ahead that were then not used must not pile up.
                    if not unit.in_use and len(self._under_way) <= MOST_AHEAD:
                        unit.gather(phase)
                case "wait":
                    unit.gather(phase)
                    unit.wait()
                    self._saved.gathered(unit)
                case "release":
                    if action.unit not in self._escaped:
                        unit.release()
                case "reduce":
                    if not self._accumulating:
                        self._reductions.ready(action.unit)

    # Forward

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        recomputing = torch._C._current_graph_task_id() != -1  # noqa: SLF001  # inside a backward pass
        alone = not self._running and module is not self.model and not recomputing
        self._running += 1  # first: the hook after this call takes it back, whatever is refused here
        if alone:
            for index in self._of_module.get(module, ()):
                self.units[index].check_held()
        changed = None
        if module is self.model and not recomputing:
            self._begin_forward()
            if self._casts_inputs:
                dtype = DTYPES[self.policy.compute]
                changed = args, kwargs = cast_tensors(args, dtype), cast_tensors(kwargs, dtype)
        if torch.is_grad_enabled() and not recomputing and not self._saved.active:
            self._saved.begin()  # a block that is called by itself, outside the model's forward pass
            self._called_alone = module
        for index in self._of_module.get(module, ()):
            if recomputing:  # gather what was released, and look no further
                self._carry_out((Action("wait", index),), "backward")
                continue
            if self._seen is not None and index not in self._schedule.outer and index not in self._seen:
                self._seen.append(index)
            self._carry_out(self._schedule.pre_forward(index), self._phase())
        if self._of_module.get(module) and not recomputing and torch.is_grad_enabled():
            self._after_backward_of(module, (args, kwargs))
        return changed

    def _begin_forward(self) -> None:
        self._running = 1
        for unit in self.units:
            unit.check_held()
        self._module_buffers.make_equal()
        if torch.is_grad_enabled():
            self._module_buffers.changed()
            if self._unfinished:
                raise ZeroError(
                    "a forward pass after a backward pass that was not finished: call finish_backward() "
                    "(and drop its gradients with optimizer.zero_grad() if the backward pass failed)"
                )
            for unit in self.units:
                unit.check_flags()
            self._calls.clear()
            self._saved.begin()
        self._escaped.clear()
        if self._seen is not None:
            self._seen = []

    def _after_backward_of(self, module: nn.Module, inputs: Any) -> None:
        """Once the gradients of a block's inputs are there, its weights are not needed any more.

        Units that count gradients are released before; this is for frozen and unused parameters.
        Leaves are left out: they outlive the pass, and so would the hook.
        """
        self._calls[module] = self._calls.get(module, 0) + 1
        tensors = [tensor for tensor in tensors_in(inputs) if tensor.grad_fn is not None]
        if module is self.model or not tensors:
            return
        reference, left = weakref.ref(self), [len(tensors)]

        def passed(_: Tensor) -> None:
            left[0] -= 1
            zero = reference()
            if left[0] == 0 and zero is not None:
                zero._calls[module] = zero._calls.get(module, 1) - 1  # noqa: SLF001  # its own hook
                if zero._calls[module] == 0:  # noqa: SLF001
                    for index in zero._of_module[module]:  # noqa: SLF001
                        zero.units[index].release()

        for tensor in tensors:
            tensor.register_hook(passed)  # type: ignore[no-untyped-call]

    def _post_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._running -= 1
        if torch._C._current_graph_task_id() != -1:  # noqa: SLF001  # recomputed: kept until its backward
            return
        outputs = list(tensors_in(output))
        try:  # all of it, though a weight that was written is an error
            self._end_units(self._of_module.get(module, ()), outputs)
        finally:
            try:
                if module is self.model:
                    self._end_forward(outputs)
            finally:
                if module is self._called_alone:
                    self._end_alone()
        if torch.is_grad_enabled() and self._of_module.get(module):
            arrive = self._arrival(module)
            for tensor in outputs:
                if tensor.grad_fn is not None:
                    tensor.register_hook(arrive)  # type: ignore[no-untyped-call]

    def _end_units(self, indices: Sequence[int], outputs: Sequence[Tensor]) -> None:
        """The module of these units has run in a forward pass."""
        if not indices:
            return
        index, *rest = indices
        unit, training = self.units[index], torch.is_grad_enabled()
        address = unit.storage_address
        if unit.gathered and any(memory_of(tensor) == address for tensor in outputs):
            self._escaped.add(index)  # a returned parameter (Megatron's bias) is used outside
        try:
            self._carry_out(self._schedule.post_forward(index, training=training), self._phase())
        finally:
            self._end_units(rest, outputs)

    def _end_alone(self) -> None:
        """A block that was called by itself has run."""
        self._saved.end()
        self._called_alone = None

    def _end_forward(self, outputs: Sequence[Tensor]) -> None:
        self._saved.end()
        if self._seen is not None:
            rest = [i for i in self._schedule.order if i not in self._seen]
            self._schedule = self._scheduled((*self._seen, *rest), self._schedule.outer)
            self._reductions.order = self._schedule.reduction_order
            self._seen = None
        addresses = {memory_of(tensor) for tensor in outputs}
        kept = self._kept if torch.is_grad_enabled() else ()
        self._escaped.clear()
        _release(  # gathered ahead and not used, or returned by a module
            unit
            for index, unit in enumerate(self.units)
            if index not in kept and not (unit.gathered and unit.storage_address in addresses)
        )

    # Parameters used outside of their modules

    def register_external(self, module: nn.Module, unit: Unit) -> None:
        """Gather ``unit`` ahead of each forward pass of ``module``, and release it after."""
        if module not in self._external:
            self._external[module] = []
            module.register_forward_pre_hook(self._pre_external)  # after the engine's own
            module.register_forward_hook(self._post_external, always_call=True)
        if (index := self.units.index(unit)) not in self._external[module]:
            self._external[module].append(index)

    def _pre_external(self, module: nn.Module, _: Any) -> None:
        recomputing = torch._C._current_graph_task_id() != -1  # noqa: SLF001  # then uses bring what they need
        fresh = [] if recomputing else [i for i in self._external[module] if not self.units[i].in_use]
        self._brought.append(fresh)
        for index in fresh:
            self._bring(index, self._phase())

    def _post_external(self, module: nn.Module, _: Any, output: Any) -> None:
        addresses = {memory_of(tensor) for tensor in tensors_in(output)}
        kept = self._kept if torch.is_grad_enabled() else ()
        for index in self._brought.pop() if self._brought else ():  # none if an earlier hook failed
            if self.units[index].storage_address not in addresses:
                self._escaped.discard(index)
                if index not in kept:
                    self.units[index].release()

    def _bring(self, index: int, phase: Phase) -> None:
        """Gather a unit that is used outside of its module; it stays until the forward pass ends."""
        self._escaped.add(index)
        self._carry_out((Action("wait", index),), phase)

    def _user(self, index: int) -> Callable[[str], None]:
        reference = weakref.ref(self)

        def used(name: str) -> None:
            zero = reference()
            if zero is None:
                raise ZeroError(f"parameter {name!r} of a sharded model whose engine is gone")
            zero._use(index, name)  # noqa: SLF001  # its own

        return used

    def _use(self, index: int, name: str) -> None:
        """A parameter is used while its unit is not shown: in a pass it is gathered, else refused."""
        if torch._C._current_graph_task_id() != -1:  # noqa: SLF001  # computed again, inside a backward pass
            self._carry_out((Action("wait", index),), "backward")
        elif self._running:
            self._bring(index, self._phase())
        else:
            raise ZeroError(
                f"parameter {name!r} is used outside of a forward pass, where its values are sharded: read "
                "or change it under GatheredParameters; gradients are the masters' "
                "(Zero.clip_grad_norm_(), impl.access)"
            )

    def check_hidden(self, what: str) -> None:
        """Refuse ``what``, which writes weights, while parameters are seen whole: leaving would undo it.

        Raises:
            ZeroError: naming it and the first of those parameters.
        """
        for unit in self.units:
            for number in unit.whole:
                name = unit.geometry.slots[number].spec.name
                raise ZeroError(f"{what} under GatheredParameters of {name!r}: leave its context first")

    def check_idle(self, what: str) -> None:
        """Refuse ``what`` inside a forward or backward pass.

        Raises:
            ZeroError: naming it.
        """
        if self._running or torch._C._current_graph_task_id() != -1:  # noqa: SLF001
            raise ZeroError(
                f"{what} inside a forward or backward pass, which gathers what it uses itself (a pass that "
                "was interrupted: call drop_gradients())"
            )

    # Backward

    # Hooks of autograd hold the engine weakly: torch keeps them where Python's garbage collector
    # cannot look.

    def _arrival(self, module: nn.Module) -> Callable[[Tensor], None]:
        reference = weakref.ref(self)

        def arrive(_: Tensor) -> None:
            zero = reference()
            if zero is not None:
                zero._arrive(module)  # noqa: SLF001  # its own hook

        return arrive

    def _arrive(self, module: nn.Module) -> None:
        """The gradient of one of ``module``'s outputs is there."""
        if torch.is_grad_enabled():
            raise ZeroError("create_graph=True: gradients of gradients are not supported")
        self._in_backward = self._unfinished = True
        for index in self._of_module[module]:
            self._carry_out(self._schedule.pre_backward(index), "backward")
            unit = self.units[index]
            if unit.geometry.trainable and not unit.local.armed and index not in self._reductions.started:
                unit.local.arm()

    def _collector(self, index: int, number: int, *, outside: bool = False) -> Callable[[Tensor], None]:
        reference = weakref.ref(self)

        def collect(_: Tensor) -> None:
            zero = reference()
            assert zero is not None  # noqa: S101  # its model is in use
            (zero._collect_outside if outside else zero._collect)(index, number)  # noqa: SLF001  # its own hook

        return collect

    def _collect_outside(self, index: int, number: int) -> None:
        """A gradient arrived at a stand-in; see :meth:`Unit.collect_outside`."""
        if index in self._reductions.started and number not in self.units[index].whole:
            self._next_pass()
        self.units[index].collect_outside(number)
        self._in_backward = self._unfinished = True

    def _collect(self, index: int, number: int) -> None:
        self._in_backward = self._unfinished = True
        if index in self._reductions.started:
            self._next_pass()
        if not self.units[index].local.begun:  # the first of its unit: all ranks' reductions are here
            self._reductions.proceed()
        in_turn = not self._accumulating and self._reductions.next() == index
        if self.units[index].collect(number, in_turn=in_turn):
            self._carry_out(self._schedule.post_backward(index), "backward")

    def _next_pass(self) -> None:
        """A second backward pass began without finish_backward() in between."""
        raise ZeroError(
            "a gradient arrived for a unit that was already reduced: call finish_backward() after "
            "each backward pass; in reentrant checkpoints a parameter that is used twice brings its "
            "gradient in parts, so use_reentrant=False there"
        )

    def check_finished(self, what: str) -> None:
        """Refuse ``what`` after a backward pass that was not finished.

        Raises:
            ZeroError: naming it.
        """
        if self._unfinished:
            raise ZeroError(f"{what} after a backward pass: call finish_backward() first")
        if any(unit.local.held for unit in self.units):
            raise ZeroError(
                f"{what} while gradients of accumulating() wait to be reduced: run the last micro-batch "
                "outside of it, or call drop_gradients()"
            )


def _release(units: Iterable[Unit]) -> None:
    """Release all of them in order, whatever fails for one; the first error is raised at the end."""
    failed: list[Exception] = []
    for unit in units:
        try:
            unit.release()
        except Exception as error:  # raised below
            failed.append(error)
    if failed:
        raise failed[0]


def _gone(_: bool) -> None:
    raise ZeroError("zero_grad() of a sharded model whose engine is gone")


def _refuse_load(engine: weakref.ref[Zero]) -> Callable[..., None]:
    def refuse(module: nn.Module, *_: Any) -> None:
        zero = engine()
        if zero is None or any(len(unit.whole) < len(unit.members) for unit in zero.units):
            raise ZeroError(
                f"{type(module).__name__}.load_state_dict() of a sharded model loads nothing: use "
                "Zero.load_full_state_dict(), or GatheredParameters of all its parameters"
            )

    return refuse


def _refuse_copy(_: object) -> None:
    raise ZeroError(
        "deepcopy() of a sharded model: weights and hooks are one engine's; copy the model before shard(), "
        "or give a new one Zero.full_state_dict()"
    )
