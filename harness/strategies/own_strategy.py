"""Defines the base class of a user's own strategy, which a suite names as ``strategy = "mine:DiLoCo"``.

A strategy changes how our engine trains.  It suits methods that change more than the reduction of gradients: local
steps (ranks train apart for several steps) with an outer optimizer, passes with stale weights, or optimizers that send
messages.  docs/guide/own_method.md is the guide, and ``examples/local_steps.py`` is an example.
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
    """Base class of a user's own strategy.  Without overrides it trains with ZeRO-3 and the trial's ``policy.*``.

    For each micro-batch the training loop calls :meth:`begin`, the model and :meth:`backward`.  Once a step it then
    calls :meth:`step`.  A subclass overrides :meth:`configure`, to take its arguments, and any of :meth:`begin`,
    :meth:`backward` and :meth:`step`.  All ranks call the methods in the same order.

    Attributes:
        zero: the engine of the sharded model (:class:`impl.engine.engine.Zero`), with ``policy.*`` of the suite.
        messages: sends tensors to groups of ranks, such as the ranks of a node
            (:class:`impl.comm.method_wire.MethodWire`).  The engine's ledger counts the bytes of these messages with
            purpose ``state``; the bytes are measured, not predicted.
    """

    messages: MethodWire

    @classmethod
    def make(cls, trial: Trial, model: nn.Module, wire: Wire, policy: Policy) -> Self:
        """Shard ``model`` and return the strategy that trains it; all ranks must call this.

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
        """Take the arguments that the suite gives as ``method.*``.

        The harness calls this method once, after the model was sharded.  This base class takes no arguments.

        Raises:
            TypeError: if an argument is given that the class does not take.
        """
        if arguments:
            raise TypeError(
                f"method.* has {', '.join(arguments)}, but this strategy takes no arguments: remove them, or define a "
                "configure() that takes them"
            )

    @property
    def masters(self) -> list[Tensor]:
        """This rank's shards of the fp32 weights, as 1-D tensors, which the optimizer updates.

        A strategy may write to these tensors.  It must then call :meth:`weights_changed` on all ranks, so that the next
        pass gathers the new weights.
        """
        return [master.detach() for master in self.zero.masters]

    def step(self, optimizer: torch.optim.Optimizer, clip: float | None) -> Stepped:
        """Clip the gradients and step the optimizer once.

        An override may, for example, call this method and then average weights over ranks.

        Args:
            optimizer: The trial's optimizer, which steps :attr:`masters`.
            clip: Largest global 2-norm of the gradient; None does not clip.

        Returns:
            The global norm of the gradient before clipping (None if it was not computed), and whether the optimizer
            stepped.
        """
        return super().step(optimizer, clip)

    @property
    def unpredicted(self) -> Sequence[Purpose]:
        """Purposes of messages whose bytes cannot be predicted, and are only measured.

        - ``state``, always: messages that the strategy sends through :attr:`messages`;
        - ``weights`` and ``gradients``, if a class of the user's own sends such messages without declaring their bytes.
        """
        return ("state", *super().unpredicted)

    def close(self) -> None:
        """Wait until all messages that users' classes have sent have arrived, discard them, and free shared memory."""
        self.messages.drain()
        super().close()
