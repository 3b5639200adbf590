"""Defines what can train a trial's model, with one interface, and makes the strategy of a trial (:func:`prepare`).

- :class:`Sharded`: our own engine, with a policy such as ZeRO++;
- :class:`Hosted`: torch's FSDP2 or DDP, whose messages our collectives send with a policy (``fsdp2+qgz``);
- :class:`Strategy`: FSDP2, DDP or a single process without our collectives.  These are peers
  (``harness.suites.peers``): engines of other libraries, with which our engine is compared;
- :class:`ByDeepSpeed`: DeepSpeed, as a peer;
- :class:`~harness.strategies.own_strategy.OwnStrategy`: a user's class, which changes how our engine trains.

Our collectives send through one object, the wire, which counts messages and bytes in a ledger.  The ledger can be
compared with a prediction.  Peers do not send through the wire, so they have neither a ledger nor a prediction.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from harness.cluster.rank import Rank
from harness.errors import Refusal
from harness.measure.gradient_bounds import Layout
from harness.strategies import deepspeed, optimizers, torch_peers
from harness.strategies.controls import spoil
from harness.suites.peers import DEEPSPEED, PEERS
from harness.suites.trial import Optimizer, Trial
from impl.adapters.inside_ddp import InDDP
from impl.adapters.inside_fsdp2 import InFSDP2
from impl.adapters.traffic import GroupGeometry
from impl.comm.hang_monitor import end_process
from impl.comm.mesh import Mesh
from impl.comm.wire import TIMEOUT_SECONDS, Transport, Wire
from impl.engine.engine import describe
from impl.engine.masters import Stepped
from impl.named_object import NamedObjectError, import_object
from impl.plan.memory import memory, with_muon, with_state
from impl.plan.owners import Owners, owners_of
from impl.plan.traffic import Book, CopyKey, Decision, Event, LedgerKey, Purpose, Sent, predict
from impl.policy.own_method import Declared, DeclaredGathers, OwnMethod, declares
from impl.policy.policy import Policy
from impl.policy.shard_layout import UnitGeometry
from impl.unit.own_gather import OwnWeightGather
from impl.zero import Zero, shard

# The messages that one rank sent through our wire (None if the strategy does not use it), and the bytes that the rank
# copied between host and device.
Books = tuple[dict[LedgerKey, Sent] | None, dict[CopyKey, int]]
# Two dicts of bytes by part of memory, such as "masters": the counted bytes, and the predicted bytes.  The second dict
# is empty unless our engine trains.
Memories = tuple[dict[str, int], dict[str, int]]
# Transports of a suite that the wire provides itself; all other transports are backends of torch.
TRANSPORTS: Final[dict[str, Transport]] = {"shm": "shm", "staged": "staged"}


@dataclass(slots=True)
class Strategy:
    """A wrapped model with the operations of a training step.

    For each micro-batch the training loop calls :meth:`begin`, ``model`` and :meth:`backward`.  Once a step it then
    calls :meth:`step`.  This class itself trains with DDP, with FSDP2, or in a single process, without our collectives.
    """

    model: nn.Module  # called like the unwrapped model
    describe: Callable[[], dict[str, Any]]  # returns the algorithms and transports used, for the record
    wire: Wire | None  # carries the messages of our collectives; None if the strategy does not use them
    # Units of our engine, or groups of parameters that FSDP2 or DDP reduces with our collectives; empty without these.
    units: Sequence[UnitGeometry | GroupGeometry]
    zero: Zero | None = None  # our own engine, if the strategy uses it
    sharing: int | None = None  # number of ranks that share one copy of FSDP2's states; None for all ranks
    _begun: bool = field(default=False, init=False)  # whether any micro-batch has begun

    def make_optimizer(self, setting: Optimizer) -> torch.optim.Optimizer:
        """Build the trial's optimizer.

        Raises:
            Refusal: if there is no such optimizer, or its arguments do not fit.
        """
        return optimizers.of_model(setting, self.model)

    def begin(self, *, last: bool) -> None:
        """Begin a micro-batch, and decide whether its backward pass reduces gradients.

        - FSDP2 reduces gradients in each micro-batch, since it holds only shards of gradients.
        - DDP reduces gradients only in the last micro-batch of a step.
        - DDP with a static graph also reduces in the first micro-batch of the run, because it learns the graph from a
          backward pass that reduces.  The gradients of this micro-batch are averaged again at the end of the step,
          which does not change their mean.

        Args:
            last: Whether this is the last micro-batch of its step.
        """
        if isinstance(self.model, nn.parallel.DistributedDataParallel):
            learning = self.model.static_graph and not self._begun
            self.model.require_backward_grad_sync = last or learning  # DDP's no_sync() sets this to False
        self._begun = True

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of ``loss`` times :attr:`loss_scale`."""
        loss.backward()  # type: ignore[no-untyped-call]

    @property
    def reduces_each_micro_batch(self) -> bool:
        """Whether gradients are reduced in every micro-batch, and not only in the last micro-batch of a step.

        With our own engine, the policy decides.  With every other engine the value is True.  For DDP this is wrong,
        since DDP reduces only in the last micro-batch, but nothing that is computed for DDP depends on the value.
        """
        return self.zero is None or self.zero.policy.reduces_each_micro_batch

    @property
    def loss_scale(self) -> float:
        """The factor by which :meth:`backward` multiplies the loss at present; 1 without loss scaling."""
        return 1.0 if self.zero is None else self.zero.scaler.scale

    def mean_gradient(self, layout: Layout) -> tuple[int, Tensor]:
        """Return this rank's part of the mean gradient of one set of parameters that is reduced together.

        With DDP, every rank has the whole gradient.  With FSDP2, the set is a parameter group, and the rank has a shard
        of the group's gradient.

        Args:
            layout: Names the set, and arranges its elements as a matrix with ``layout.row`` columns.

        Returns:
            (first, rows).  ``rows`` is the rank's part of this matrix, (n, ``layout.row``) in fp32, and ``first`` is
            the number of its first row in the whole matrix, counted from 0.
        """
        if isinstance(self.model, nn.parallel.DistributedDataParallel):
            whole = self.model.module.named_parameters()
            return 0, layout.packed({name: parameter.grad for name, parameter in whole})
        parts = {
            name: None if parameter.grad is None else optimizers.local_part(parameter.grad)
            for name, parameter in self.model.named_parameters()
        }
        return dist.get_rank() % (self.sharing or dist.get_world_size()), layout.part(parts)

    def forget_gradients(self) -> None:
        """Drop all gradients and gathered weights, so that passes outside of training do not affect the next step."""
        for parameter in self.model.parameters():
            parameter.grad = None
        self.weights_changed()

    def step(self, optimizer: torch.optim.Optimizer, clip: float | None) -> Stepped:
        """Clip the gradients and step the optimizer.

        This class always steps.  Our engine (:class:`Sharded`) skips the step if fp16 gradients overflowed.

        Args:
            optimizer: The optimizer of :meth:`make_optimizer`.
            clip: Largest global 2-norm of the gradient; None does not clip.

        Returns:
            The global norm of the gradient before clipping (None if it was not computed), and whether the optimizer
            stepped.
        """
        norm = None if clip is None else self.clip(clip)
        optimizer.step()
        return Stepped(norm, done=True)

    def clip(self, largest: float) -> float:
        """Scale gradients to a global 2-norm of at most ``largest``, and return the norm before clipping."""
        norm: Any = nn.utils.clip_grad_norm_(self.model.parameters(), largest)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def weights_changed(self) -> None:
        """Free weights that are still gathered, since they are out of date; the next pass gathers them again."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Make forward and backward passes inside the context have no effect on later training.

        When the context ends, also by an exception, gradients and gathered weights are dropped, and the model's
        buffers are restored.  Our own engine also restores the state on which later messages depend, such as the
        quantisation errors that error feedback carries over to the next step.
        """
        kept = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, values in kept:
                    buffer.copy_(values)
            self.forget_gradients()

    def forget_gathered(self) -> None:
        """Free all gathered weights, so that the next pass gathers them again even if they have not changed."""
        if self.zero is None:
            self.weights_changed()
        else:
            self.zero.forget_gathered()

    @property
    def decisions(self) -> Sequence[Decision]:
        """The codecs that the policy's bit budget has chosen so far during training; empty without a bit budget.

        A bit budget limits the bits per element of messages.  Within this limit, our engine chooses codecs while it
        trains.
        """
        return () if self.zero is None or self.zero.renewal is None else self.zero.renewal.decisions

    def ledger(self) -> dict[LedgerKey, Sent] | None:
        """Return the bytes and messages that this rank has sent so far through our :class:`~impl.comm.wire.Wire`.

        Returns None if a library such as DDP sends the messages itself.
        """
        return None if self.wire is None else self.wire.ledger.rows()

    def books(self) -> Books:
        """Return the messages that this rank has sent so far, and the bytes that it has copied between host and device.

        Returns:
            Two dicts: bytes and messages sent through our :class:`~impl.comm.wire.Wire` (:meth:`ledger`), and bytes
            copied for offloading.  The first is None if a library such as DDP sends the messages itself.  The second is
            empty for engines other than ours.
        """
        return self.ledger(), {} if self.zero is None else self.zero.copied()

    def predicted(self, events: Sequence[Event]) -> Books:
        """Predict what this rank sends, and copies between host and device, during the passes and steps in ``events``.

        Args:
            events: The passes and optimizer steps, in order.

        Returns:
            (sent, copied).  ``sent`` is the bytes and messages sent through our :class:`~impl.comm.wire.Wire`, or None
            if a library such as DDP sends the messages itself.  ``copied`` is the bytes copied between host and device;
            it is empty unless our engine trains.
        """
        return None, {}

    def predicted_steps(self, before: Sequence[Event], events: Sequence[Event]) -> list[tuple[int, int]]:
        """Predict how many bytes this rank has sent, by the end of each step, since training began.

        Args:
            before: The passes before the first step.
            events: The passes and steps that follow.

        Returns:
            A pair (bytes to other nodes, bytes inside the node) for the end of ``before``, then a pair for the end of
            each step.  All are counted from the start of training, without messages of evaluations.  If another engine
            than ours trains, the list is empty.
        """
        return []

    @property
    def unpredicted(self) -> Sequence[Purpose]:
        """Purposes of messages whose bytes cannot be predicted, and are only measured; here none.

        With our engine, these may be ``weights`` or ``gradients``: messages that a class of the user's own sends
        without declaring their bytes.
        """
        return ()

    def exposed_seconds(self) -> float | None:
        """Return the seconds that this rank has waited for messages so far.

        If the stream of a GPU waits for messages, only the stream's waits that have ended are counted: synchronise the
        device before this call to count all waits.  The stream's waits are timed only after the first call of this
        method or of :meth:`mark_exposed`.  Returns None if a library such as DDP sends the messages itself.
        """
        return None if self.wire is None else self.wire.exposed_seconds

    def mark_exposed(self) -> Callable[[], float] | None:
        """Mark this moment; return a function that gives the seconds that this rank had waited for messages by then.

        Waits that begin after the mark are not counted.  On a GPU, the length of a wait is known only after the wait
        has ended.  The returned function reads the lengths when it is called.  It therefore counts all waits before the
        mark, even if the device was not synchronised then (unlike :meth:`exposed_seconds`).

        Returns:
            The function.  On a GPU, call it only after the device has done all work that was queued before
            ``mark_exposed()``.  None if a library such as DDP sends the messages itself.
        """
        return None if self.wire is None else self.wire.mark_exposed()

    def memory(self, trial: Trial, optimizer: torch.optim.Optimizer) -> Memories:
        """Return the memory of this rank's training states in bytes: as counted, and as predicted.

        Returns:
            (counted, predicted).  Both are dicts from a part of memory, such as ``masters`` (fp32 weights), to bytes.
            With our engine, both hold peaks, and the prediction is by :mod:`impl.plan.memory`.  With any other engine,
            ``counted`` holds the present bytes of masters, gradients and optimizer state, without gathered weights, and
            ``predicted`` is empty.
        """
        held = sum(optimizers.local_part(parameter).nbytes for parameter in self.model.parameters())
        states = optimizers.state_bytes(optimizer, optimizer.state)
        return {"masters": held, "gradients": held, "optimizer": states}, {}

    def close(self) -> None:
        """Free the shared memory in which ranks read each other's messages, if the strategy uses our wire.

        The wire (:class:`~impl.comm.wire.Wire`) is the object through which our collectives send.
        """
        if self.wire is not None:
            self.wire.close()


@dataclass(slots=True)
class Hosted(Strategy):
    """The strategy that trains with torch's FSDP2 or DDP, and sends their messages through our collectives."""

    _: KW_ONLY
    joined: InFSDP2 | InDDP  # the adapter between torch's engine and our collectives

    def exposed_seconds(self) -> float | None:
        """Return the seconds that this rank has waited for messages so far.

        Returns None if messages are received on a GPU's streams.  FSDP2 itself then waits for these messages, and our
        code cannot time this wait.
        """
        assert self.wire is not None  # noqa: S101  # the adapter sends over it
        return None if self.wire.streams else self.wire.exposed_seconds

    def mark_exposed(self) -> Callable[[], float] | None:
        """Mark this moment; return a function that gives the seconds that this rank had waited for messages by then.

        Waits that begin after the mark are not counted.

        Returns:
            The function.  None if :meth:`exposed_seconds` returns None.
        """
        assert self.wire is not None  # noqa: S101  # the adapter sends over it
        return None if self.wire.streams else self.wire.mark_exposed()

    def clip(self, largest: float) -> float:
        """Scale gradients to a global 2-norm of at most ``largest``, and return the norm before clipping.

        The norms of FSDP2's shards are summed through our :class:`~impl.comm.wire.Wire`.
        """
        return float(self.joined.clip_grad_norm_(largest))

    def predicted(self, events: Sequence[Event]) -> Books:
        """Predict what this rank sends during the passes and steps in ``events``.

        Args:
            events: The passes and optimizer steps, in order.

        Returns:
            Two dicts.  The first has the bytes and messages sent through our :class:`~impl.comm.wire.Wire`.  The
            second, for copies between host and device, is empty, since FSDP2 and DDP make no such copies here.
        """
        return self.joined.predict(events), {}


@dataclass(slots=True)
class ByDeepSpeed(Strategy):
    """A model that DeepSpeed trains; ``model`` is DeepSpeed's engine.

    The engine itself clips gradients, and accumulates the gradients of the micro-batches of a step.
    """

    model: Any
    _: KW_ONLY
    stepping: torch.optim.Optimizer  # the trial's optimizer, whose parameters are now DeepSpeed's shards
    _last: bool = True  # whether this micro-batch is the last of its step
    # Bytes of hpZ's copy of the weights, measured before the first step, because a step frees the copy.
    _secondary: int | None = None

    def make_optimizer(self, setting: Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer that DeepSpeed was given together with the model."""
        return self.stepping

    def begin(self, *, last: bool) -> None:
        """Note whether this micro-batch is the last of its step, which :meth:`backward` needs to know."""
        self._last = last

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of ``loss`` in DeepSpeed's engine.

        DeepSpeed's own ``step()`` must be called after every micro-batch.  After the last micro-batch of a step,
        :meth:`step` calls it; after each earlier micro-batch, this method calls it.
        """
        self.model.backward(loss, scale_wrt_gas=False)  # the loss is already divided by the accumulation
        if not self._last:
            self.model.step()

    def step(self, optimizer: torch.optim.Optimizer, clip: float | None) -> Stepped:
        """Step DeepSpeed's engine, which clips the gradients itself (``gradient_clipping`` of its configuration).

        Args:
            optimizer: Not used; DeepSpeed steps the optimizer that it was given.
            clip: The same limit as ``gradient_clipping``.  Here it decides only whether the norm is returned.

        Returns:
            The global norm of the gradient before clipping (None if ``clip`` is None), and ``done=True``.
        """
        if self._secondary is None:
            copies = [getattr(weight, "ds_secondary_tensor", None) for weight in self.model.parameters()]
            self._secondary = sum(copy.nbytes for copy in copies if copy is not None)
        self.model.step()
        return Stepped(None if clip is None else float(self.model.get_global_grad_norm()), done=True)

    def weights_changed(self) -> None:
        """Free gathered weights, since they are out of date.

        Parameters that are smaller than DeepSpeed's persistence threshold stay gathered.
        """
        self.model.empty_partition_cache()

    def memory(self, trial: Trial, optimizer: torch.optim.Optimizer) -> Memories:
        """Return the memory of this rank's training states in bytes, by part of memory.

        Returns:
            Two dicts.  The first has these parts:

            - ``masters``: the fp32 weights that the optimizer steps, and the shards of the weights in the type of
              computing;
            - ``gradients``: assumed to be as large as the fp32 weights;
            - ``optimizer``: the optimizer's state;
            - ``secondary``: hpZ's copy of the weights, if there is such a copy.

            The second dict, of predicted bytes, is empty.
        """
        masters: list[Tensor] = list(optimizer.state)  # DeepSpeed empties the groups between steps
        weights = [getattr(weight, "ds_tensor", weight) for weight in self.model.parameters()]
        distinct = {tensor.data_ptr(): tensor.nbytes for tensor in (*masters, *weights)}
        held = {"masters": sum(distinct.values()), "gradients": sum(master.nbytes for master in masters)}
        held["optimizer"] = optimizers.state_bytes(optimizer, optimizer.state)
        return held | ({"secondary": self._secondary} if self._secondary else {}), {}


@dataclass(slots=True)
class Sharded(Strategy):
    """The strategy in which our own engine, ``impl.zero``, trains the model with a policy."""

    units: Sequence[UnitGeometry]
    zero: Zero

    def make_optimizer(self, setting: Optimizer) -> torch.optim.Optimizer:
        """Build the trial's optimizer, which steps this rank's shards of the master weights.

        Raises:
            Refusal: if there is no such optimizer, or its arguments do not fit.
        """
        return optimizers.of_engine(setting, self.zero)

    def begin(self, *, last: bool) -> None:
        """Begin a micro-batch, whose backward pass reduces gradients if the policy says so.

        Some policies reduce gradients in every micro-batch.  All other policies reduce gradients only in the last
        micro-batch of a step; ``last`` says whether this is the last.
        """
        if not self.reduces_each_micro_batch:
            self.zero.accumulate(on=not last)

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of ``loss`` times :attr:`loss_scale`."""
        self.zero.scaler.scaled(loss).backward()  # type: ignore[no-untyped-call]

    def mean_gradient(self, layout: Layout) -> tuple[int, Tensor]:
        """Return this rank's shard of the mean gradient of one unit, as rows of a matrix.

        A unit is a set of parameters that are reduced together.  If the policy reduces gradients only in the last
        micro-batch of a step, call this method after that micro-batch.

        Args:
            layout: Names the unit, and arranges the unit's elements as a matrix with ``layout.row`` columns.

        Returns:
            (first, rows).  ``rows`` is the rank's part of this matrix, (n, ``layout.row``) in fp32, and ``first`` is
            the number of its first row in the whole matrix, counted from 0.
        """
        (unit,) = (unit for unit in self.zero.units if unit.geometry == layout.geometry)
        mean = unit.master_shard.mean_gradient()
        mean = torch.zeros(unit.geometry.shard) if mean is None else mean
        return unit.geometry.bounds(self.zero.wire.mesh.rank)[0] // layout.row, mean.view(-1, layout.row)

    def forget_gradients(self) -> None:
        """Drop all gradients and gathered weights, so that passes outside of training do not affect the next step.

        This method also

        - drops the quantisation errors that error feedback carries over to the next step;
        - replaces the objects of users' classes that reduce gradients or gather weights by new objects;
        - counts micro-batches from 0 again.  The next training pass then draws the same random bits, for stochastic
          rounding, as if the passes outside of training had not run.
        """
        self.zero.model.zero_grad()
        for unit in self.zero.units:
            unit.reduction.clear_feedback()
            if isinstance(unit.weight_gather, OwnWeightGather):
                unit.weight_gather.reset()
        self.zero.clock.micro_batch = 0
        self.weights_changed()

    def step(self, optimizer: torch.optim.Optimizer, clip: float | None) -> Stepped:
        """Clip gradients and step the optimizer; the step is skipped on all ranks if fp16 gradients overflowed.

        Args:
            optimizer: The optimizer of :meth:`make_optimizer`.
            clip: Largest global 2-norm of the gradient; None does not clip.

        Returns:
            The global norm of the gradient before clipping (None if it was not computed), and whether the optimizer
            stepped.
        """
        return self.zero.step(optimizer, max_norm=clip)

    def weights_changed(self) -> None:
        """Free weights that are still gathered, since they are out of date; the next pass gathers them again."""
        self.zero.weights_changed()

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Make forward and backward passes inside the context have no effect on later training.

        When the context ends, also by an exception, gradients and gathered weights are dropped.  Buffers, and the
        quantisation errors that error feedback carries over to the next step, are restored.
        """
        with self.zero.rehearsing():
            yield

    def predicted(self, events: Sequence[Event]) -> Books:
        """Predict what this rank sends, and copies between host and device, during the passes and steps in ``events``.

        Args:
            events: The passes and optimizer steps, in order.

        Returns:
            Two dicts: bytes and messages sent through our :class:`~impl.comm.wire.Wire`, and bytes copied between host
            and device.
        """
        book = self._book(events)
        return book.sent, book.copied

    def predicted_steps(self, before: Sequence[Event], events: Sequence[Event]) -> list[tuple[int, int]]:
        """Predict how many bytes this rank has sent, by the end of each step, since training began.

        Args:
            before: The passes before the first step.
            events: The passes and steps that follow.

        Returns:
            A pair (bytes to other nodes, bytes inside the node) for the end of ``before``, then a pair for the end of
            each step.  All are counted from the start of training.
        """
        totals = [self._book(before).trained, *self._book([*before, *events]).steps]
        return [(sent.get("inter", 0), sent.get("intra", 0)) for sent in totals]

    def _book(self, events: Sequence[Event]) -> Book:
        """Predict this rank's messages, and its copies between host and device, in all ``events``."""
        policy, mesh = self.zero.policy, self.zero.wire.mesh
        kept: dict[str, Any] = {"buffer_bytes": self.zero.buffers.nbytes, "decisions": self.decisions}
        kept["methods"], kept["gathers"] = self._declared(), self._declared_gathers()
        kept["owners"] = self.owners
        return predict(policy, mesh.topology, self.units, mesh.rank, events, **kept)

    @property
    def owners(self) -> Owners | None:
        """The owner of each matrix that Muon updates; None for other optimizers.

        The owner is the rank that orthogonalises the matrix.
        """
        return owners_of(self.zero.policy, self.zero.wire.mesh.topology, self.units)

    def _declared(self) -> Declared:
        """Return the messages that a user's class declares for one reduction of each unit's gradients.

        A unit is a set of parameters that are reduced together.

        Returns:
            A dict whose keys are the names of the units that the class reduces.  Each value is the messages of one
            reduction of the unit, or None if the class does not declare its messages.
        """
        topology = self.zero.wire.mesh.topology
        owns = {unit.geometry.name: unit.reduction.own for unit in self.zero.units}
        return {name: own.messages(topology) for name, own in owns.items() if own is not None}

    def _declared_gathers(self) -> DeclaredGathers:
        """Return, for each unit that a user's class gathers, a function that returns the messages of a gather.

        A unit is a set of parameters that are gathered together.

        Returns:
            A dict whose keys are the names of the units that the class gathers.  Each value is a function.  The
            function takes the description of a gather (``GatherInfo``), and returns the messages that the class
            declares for this gather, or None if the class does not declare its messages.
        """
        topology = self.zero.wire.mesh.topology
        gathers = {unit.geometry.name: unit.weight_gather for unit in self.zero.units}
        return {
            name: partial(gather.own.messages, topology)
            for name, gather in gathers.items()
            if isinstance(gather, OwnWeightGather)
        }

    @property
    def unpredicted(self) -> Sequence[Purpose]:
        """Purposes of messages (``weights``, ``gradients``) whose bytes cannot be predicted, and are only measured.

        These are the messages that a class of the user's own sends without declaring their bytes.
        """
        policy = self.zero.policy
        owns: dict[Purpose, OwnMethod | None] = {"weights": policy.own_gather, "gradients": policy.own_reduce}
        return [purpose for purpose, own in owns.items() if own is not None and not declares(own)]

    def close(self) -> None:
        """Wait until the messages that users' classes sent have arrived, discard them, and free shared memory."""
        for unit in self.zero.units:
            if unit.reduction.own is not None:
                unit.reduction.own.drain()
            if isinstance(unit.weight_gather, OwnWeightGather):
                unit.weight_gather.own.drain()
        self.zero.wire.close()

    def memory(self, trial: Trial, optimizer: torch.optim.Optimizer) -> Memories:
        """Return the peak memory of this rank's training states in bytes: as counted, and as predicted.

        If no parameter is trained, the prediction is for forward passes only.

        Returns:
            (counted, predicted).  Both are dicts from a part of memory, such as ``masters`` (fp32 weights), to bytes.
        """
        held = self.zero.memory() | {"optimizer": 0, "host_optimizer": 0}
        for master_shard in (unit.master_shard for unit in self.zero.units):
            part = "host_optimizer" if master_shard.placement.shard else "optimizer"
            held[part] += optimizers.state_bytes(optimizer, (master for _, master in master_shard.masters))
        topology, units = self.zero.wire.mesh.topology, self.units
        trained = any(unit.trainable for unit in units)
        wire, policy = self.zero.wire, self.zero.policy
        predicted = partial(memory, policy, topology, units, micro_batches=trial.accumulation)
        parts = predicted(backward=trained, streams=wire.streams, in_place=wire.lets_go)
        if (owners := self.owners) is not None:
            return held, with_muon(parts, units, owners, wire.mesh.rank)
        return held, with_state(parts, optimizers.state_bytes_per_element(trial.optimizer))


def prepare(trial: Trial, model: nn.Module, rank: Rank, device: torch.device) -> Strategy:
    """Make the strategy of a trial from ``model``, which is changed in place.  All ranks must call this.

    Raises:
        Refusal: if DeepSpeed or its optimizer cannot be set up, or a user's own strategy cannot be imported or
            configured.
        PolicyError: if the policy does not fit the topology or the model.
        GeometryError: if a unit (set of parameters that are gathered together) cannot be laid out in shards.
    """
    policy, host = trial.resolved_policy(), trial.host
    if policy is None:
        peer, settings = PEERS[trial.strategy], trial.peer
        if peer.family != DEEPSPEED:
            local = trial.cluster.ranks_per_node
            wrapped = torch_peers.wrap(peer, model, device, settings, local)
            sharing = local if settings.group == "node" else trial.topology().world
            describe_peer = partial(torch_peers.algorithms, peer, settings)
            return Strategy(wrapped, describe_peer, None, (), sharing=sharing)
        config = deepspeed.configuration(trial)
        optimizer = optimizers.build(trial.optimizer, model.parameters())
        engine = deepspeed.initialise(model, optimizer, config, device)
        libraries = {"deepspeed": deepspeed.version(), "deepspeed_config": config}
        return ByDeepSpeed(engine, lambda: libraries, None, (), stepping=optimizer)
    wire = wire_of(trial, rank, device)
    if trial.own_strategy:
        own: Strategy = strategy_class(trial.strategy).make(trial, model, wire, policy)
        return own
    if host is None:
        return shard_model(trial, model, wire, policy)
    joined: InFSDP2 | InDDP
    if host == "fsdp2":
        wrapped = torch_peers.wrap(PEERS[host], model, device)
        joined = InFSDP2(wrapped, wire, policy)
    else:  # without broadcast_buffers: DDP would broadcast buffers before each forward pass, outside our wire
        wrapped = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
        joined = InDDP(wrapped, wire, policy)
    return Hosted(wrapped, joined.describe, wire, joined.units, joined=joined)


def strategy_class(name: str) -> Any:
    """Import the subclass of :class:`~harness.strategies.own_strategy.OwnStrategy` that a trial's ``strategy`` names.

    Raises:
        Refusal: if the class cannot be imported, or is not derived from OwnStrategy.
    """
    try:
        kind = import_object(name)
    except NamedObjectError as error:
        raise Refusal(f"strategy {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, Sharded) and hasattr(kind, "configure")):
        raise Refusal(f"strategy {name}: expected a subclass of harness.strategies.Strategy")
    return kind


def wire_of(trial: Trial, rank: Rank, device: torch.device) -> Wire:
    """Create the wire of a trial, the object through which this rank sends its messages; all ranks must call this."""
    transport = TRANSPORTS.get(trial.cluster.transport, "backend")
    return Wire(
        rank.mesh or Mesh.create(rank.topology, device),
        transport=transport if rank.mesh is None else "backend",
        pacer=rank.pacer,
        # Much shorter than the launcher's limit for the trial, so that ranks can still report where they wait.
        timeout=min(TIMEOUT_SECONDS, trial.timeout_seconds / 4),
        on_hang=rank.fail or end_process,
    )


def shard_model(trial: Trial, model: nn.Module, wire: Wire, policy: Policy) -> Sharded:
    """Shard ``model`` with our engine, and return the strategy that trains it.  All ranks must call this.

    If the trial has a ``control``, a fault is put into the engine on purpose
    (:func:`~harness.strategies.controls.spoil`).
    """
    groups = optimizers.group_of(trial.optimizer, model)
    zero = shard(model, mesh=wire.mesh, policy=policy, wire=wire, seed=trial.seed, group_of=groups)
    spoil(zero, trial.control)
    units = [unit.geometry for unit in zero.units]
    return Sharded(model, partial(describe, zero), wire, units, zero)
