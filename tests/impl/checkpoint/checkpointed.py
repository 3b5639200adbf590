"""Helpers for tests of checkpoints: a run in training, and the contents of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from examples.differences import Differences
from examples.powersgd import PowerSGD
from impl.checkpoint.manifest import Manifest, read_manifest
from impl.checkpoint.resharding import Parts
from impl.checkpoint.save_load import Loaded, load, save
from impl.codecs.codec import parse
from impl.comm.mesh import Mesh
from impl.policy.own_method import method
from impl.policy.policy import Feedback, LossScale, Offload, Policy, parse_budget
from impl.policy.presets import PRESETS
from tests.support.models import Odd
from tests.support.strategies import ROOMY
from tests.support.training import Training, model

# Made once: thread ranks share torch's generator, and would draw each other's values.
NET, ODD = model(), model(Odd)
INT4 = parse("int4:8")
NOISY = parse("int4:8:stochastic")

EMPTY = Manifest("a test", 0, 0, "1x1", of={}, state={}, optimizers=[], loss_scale=None, extra=None, files=[])


POLICIES = {
    **{name: replace(policy, memory=ROOMY) for name, policy in PRESETS.items()},
    "stochastic": Policy(weights=NOISY, gradients=(NOISY, NOISY), secondary="node", memory=ROOMY),
    "feedback": Policy(
        gradients=(INT4, NOISY), memory=ROOMY, feedback=Feedback(decay=0.5, reset=3, hops="all", state="bf16")
    ),
    # The scale falls and rises, and steps are skipped, before and after the save.
    "fp16": Policy(compute="fp16", loss_scale=LossScale(initial=2.0**18, window=1), memory=ROOMY),
    "budget": Policy(
        weights=INT4, gradients=(INT4, NOISY), secondary="node", memory=ROOMY,
        budget=parse_budget("weights gradients every 2 of int2:8 int3:8 int8:8:stochastic"),
    ),
    "differences": Policy(
        weights=parse("int8:8"), secondary=1, secondary_format="fp16", differences=INT4, refresh=3,
        memory=ROOMY,
    ),
    "persistent": replace(PRESETS["zeropp"], memory=replace(ROOMY, persist_below=30)),
    "offload": replace(PRESETS["zeropp"], memory=ROOMY, offload=Offload(optimizer=0.5, weights=0.5)),
    # Saved after two steps, between meetings, when groups have different weights.
    "local": Policy(
        group="node", weights=parse("int8:8"), gradients=(INT4, NOISY), memory=ROOMY,
        feedback=Feedback(hops="all"), local_steps=3, local_fragments=2,
    ),
    "mics+feedback": Policy(group=2, gradients=(INT4, INT4), feedback=Feedback(), memory=ROOMY),
    "own": Policy(reduce=method(PowerSGD, rank=1), gather=method(Differences), memory=ROOMY),
}  # fmt: skip


class Run(Training):
    """A sharded model in training on one rank; vectors have no weight decay."""

    def __init__(
        self,
        mesh: Mesh,
        policy: Policy,
        net: nn.Module,
        *,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        **options: Any,
    ) -> None:
        choices = {"optimize": partial(optimizer, lr=1e-2), "groups": {1: {"weight_decay": 0.0}}}
        super().__init__(mesh, net, policy, group_of=_group_of, **choices, **options)

    def state(self) -> dict[str, Tensor]:
        return {**self.zero.full_state_dict(), **self.zero.communication_state()}

    def save(self, folder: Path, **options: Any) -> None:
        save(folder, self.zero, self.optimizers, **options)

    def load(self, folder: Path) -> Loaded:
        return load(folder, self.zero, self.optimizers)


def _group_of(name: str, parameter: nn.Parameter) -> int:
    return int(parameter.dim() < 2)


class Dropping(nn.Module):
    """A module that draws random numbers, and counts its passes in a buffer and in extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.norm = nn.BatchNorm1d(16)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        for block in self.blocks:
            x = torch.dropout(block(x), 0.5, self.training)
        return self.norm(x).tanh().square().mean()

    def get_extra_state(self) -> dict[str, Any]:
        return {"passes": self.passes, "of": (1, 2)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.passes = state["passes"]


def written(mesh: Mesh, folder: Path, policy: Policy, net: nn.Module, width: int = 16) -> None:
    run = Run(mesh, policy, net, width=width)
    run.step(0)
    run.step(1)
    run.save(folder)


def contents(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns everything in a checkpoint by name: whole tensors of weights and states, options and numbers."""
    manifest = read_manifest(path)
    parts = Parts(path, manifest)
    tensors = {
        f"{kind}/{name}": parts.read(kind, name, 0, math.prod(shape))
        for name, shape in manifest.parameters.items()
        for kind in parts.ranges[name]
    }
    numbers = {f"{index}": state for index, state in enumerate(manifest.optimizers)}
    return tensors | parts.tensors(0, "buffer"), numbers


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        x.dtype == second[name].dtype and torch.equal(x, second[name]) for name, x in first.items()
    )
