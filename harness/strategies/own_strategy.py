"""Strategies of one's own: a class that changes how our engine trains, named as ``strategy = "mine:DiLoCo"``.

Such a class is for methods that are more than a reduction of gradients: local steps with an outer optimizer, stale
weights, optimizers that communicate.  docs/guide/own_method.md is the guide, ``examples/local_steps.py`` an example.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from harness.errors import Refusal
from harness.strategies.strategy import Sharded, shard_model
from harness.suites.trial import Trial
from impl.comm.method_wire import MethodWire
from impl.comm.wire import Wire
from impl.engine.masters import Stepped
from impl.errors import raised
from impl.plan.traffic import Purpose, Tag
from impl.policy.policy import Policy


class OwnStrategy(Sharded):
    """Base class of strategies of one's own; as it is, it trains ZeRO-3 with the trial's ``policy.*``.

    A step is, for each micro-batch, :meth:`begin`, a call of the model and :meth:`backward`; then :meth:`step`.
    Override :meth:`configure` and whichever of these should be different.  All ranks call them in the same order.

    Attributes:
        zero: the engine of the sharded model (:class:`impl.engine.engine.Zero`), with ``policy.*`` of the suite.
        messages: sends tensors along axes of the mesh (:class:`impl.comm.method_wire.MethodWire`).  Its bytes are in
            the ledger with purpose ``state``; they are measured, not predicted.
    """

    messages: MethodWire

    @classmethod
    def make(cls, trial: Trial, model: nn.Module, wire: Wire, policy: Policy) -> Self:
        """Shard ``model`` and make the trial's strategy of it; all ranks must call this.

        Raises:
            Refusal: if :meth:`configure` raises an exception.
        """
        sharded = shard_model(trial, model, wire, policy)
        made = cls(model, sharded.describe, wire, sharded.units, sharded.zero)
        made.messages = MethodWire(wire, Tag("step", "state"))
        try:
            made.configure(**trial.method)
        except Exception as error:
            where = f"on rank {wire.mesh.rank}: configure() raised"
            raise Refusal(f"strategy {trial.strategy} {where} {raised(error)}") from error
        return made

    def configure(self, **arguments: Any) -> None:
        """Take the arguments that the suite gives as ``method.*``; called once, after the model was sharded.

        Raises:
            TypeError: for an argument that the class does not know.
        """
        if arguments:
            raise TypeError(
                f"unexpected arguments {', '.join(arguments)}: remove them from method, or let configure() take them"
            )

    @property
    def masters(self) -> list[Tensor]:
        """This rank's fp32 weights: 1-D shards, which the optimizer steps.

        After writing to them outside of the optimizer, call :meth:`weights_changed` on all ranks.
        """
        return [master.detach() for master in self.zero.masters]

    def step(self, optimizer: torch.optim.Optimizer, clip: float | None) -> Stepped:
        """Step the optimizer once; an override can call this method and then communicate, for example.

        Returns:
            The norm of the gradient before clipping, if it was computed, and whether the step was taken.
        """
        return super().step(optimizer, clip)

    @property
    def unpredicted(self) -> Sequence[Purpose]:
        """Purposes of messages that are measured and not predicted.

        They are ``state``, the purpose of :attr:`messages`, and those of methods that declare no bytes.
        """
        return ("state", *super().unpredicted)

    def close(self) -> None:
        """Receive what was sent through :attr:`messages`, and free shared memory."""
        self.messages.drain()
        super().close()
