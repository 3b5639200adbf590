"""Runs of one rank as a sequence of actions, with the events from which traffic is predicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import torch
from torch import Tensor, nn

from impl.comm.mesh import Mesh
from impl.plan.traffic import Book, Event, predict
from impl.policy.policy import Policy
from impl.zero import Zero
from tests.support.training import Training, batch


class History(Training):
    """A run of one rank, one action after the other."""

    def __init__(
        self,
        mesh: Mesh,
        net: nn.Module,
        policy: Policy,
        *,
        width: int = 16,
        max_norm: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(mesh, net, policy, width=width, **options)
        self.width, self.max_norm, self.optimizer = width, max_norm, self.optimizers[0]
        self.events: list[Event] = []  # as predictions take them
        self.seen: list[Any] = []  # losses, norms, and results of steps

    def act(self, kind: str, number: int) -> None:
        """Perform one action, with the data of a micro-batch; a spike is a loss that overflows."""
        zero, x = self.zero, batch(number, self.mesh.rank, self.width)
        match kind:
            case "train" | "clipped" | "accumulate" | "skip" | "spike":
                self._train(kind, number, torch.inf if kind == "spike" else 1)
                if kind != "accumulate":
                    self.optimizer.zero_grad(set_to_none=kind != "clipped")
            case "evaluate":
                with torch.inference_mode():
                    self.seen.append(self.net.eval()(x).item())
                self.net.train()
                self.events.append("evaluate")
            case "norm":
                if [event for event in self.events if event != "evaluate"][-1:] == ["accumulate"]:
                    self.act("drop", number)  # a norm of local gradients is refused
                zero.grad_norm()
                self.events.append("norm")
            case "rehearse":
                if not self.policy.reduces_each_micro_batch:
                    self.act("drop", number)
                self.optimizer.zero_grad()
                with zero.wire.observed(Mock()), zero.rehearsing():
                    self.net(x).backward()
                self.events.append("forgotten")
            case "drop":
                zero.drop_gradients()
                self.events.append("dropped")
            case "by hand":
                with torch.no_grad():
                    for unit in zero.units:
                        unit.master_shard.master.mul_(2)
                zero.weights_changed()
                self.events.append("changed")
            case "load":
                state = zero.full_state_dict()  # its only scalars are buffers
                zero.load_full_state_dict({k: v * 0.5 if v.dim() else v for k, v in state.items()})
                self.events.append("changed")
            case "save":
                saved = zero.full_state_dict(), zero.communication_state()
                zero.load_full_state_dict(saved[0])
                zero.load_communication_state(saved[1])
                self.events.append("forgotten")
            case "again":
                zero.load_communication_state(zero.communication_state())
            case _:
                raise AssertionError(kind)

    def _train(self, kind: str, number: int, factor: float) -> None:
        zero, local = self.zero, kind == "accumulate" and not self.policy.reduces_each_micro_batch
        self.loss_of = lambda net, number, rank: net(batch(number, rank, self.width) * factor)
        self.seen.append(self.backward(number, local=local))
        self.events += ["forward", "accumulate" if local else "backward"]
        if kind == "clipped":
            self.seen.append(zero.clip_grad_norm_(0.01).item())
            self.optimizer.step()
            self.events += ["norm", "step"]
        elif kind in ("train", "spike"):
            stepped = zero.step(self.optimizer, max_norm=self.max_norm)
            self.seen.append(stepped)
            self.events += ["norm"] if self.max_norm else []
            self.events += ["step"] if stepped.done else []

    def predicted(self, **options: Any) -> Book:
        """This rank's messages and copies, predicted from its events."""
        units = [unit.geometry for unit in self.zero.units]
        return predict(self.policy, self.mesh.topology, units, self.mesh.rank, self.events, **options)


def history_of(mesh: Mesh, net: nn.Module, policy: Policy, kinds: Sequence[str], **options: Any) -> History:
    """A run that has performed these actions."""
    history = History(mesh, net, policy, **options)
    for number, kind in enumerate(kinds):
        history.act(kind, number)
    return history


def gathered(zero: Zero) -> list[Tensor]:
    """The gathered weights of every unit."""
    weights = []
    for unit in zero.units:
        unit.all_gather("evaluate")
        weights += [member.parameter.detach().clone() for member in unit.members]
        unit.reshard()
    return weights
