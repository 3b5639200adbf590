"""Training programs as users write them, drawn by Hypothesis, for one process and for sharded ranks.

A :class:`Program` is data: a model, an optimizer, and for each step what the loop does.  :func:`run` performs
it on a :class:`OneProcess`, which sees the batches of all ranks, or on a :class:`Sharded` rank; both give the
values of evaluations and the final state.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import hypothesis.strategies as st
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F
from torch.optim.lr_scheduler import MultiStepLR
from torch.utils.checkpoint import checkpoint

from impl.checkpoint.save_load import load, save
from impl.comm.mesh import Mesh
from impl.errors import ZeroError
from impl.parameters.gathered import GatheredParameters
from impl.policy.policy import MemoryLimits, Offload, Policy
from impl.policy.presets import preset
from impl.policy.topology import Topology
from impl.zero import Zero, shard
from tests.support.optimizers import HalvesGradients, Lamb
from tests.support.training import model

WIDTH = 8
ROOMY = MemoryLimits(max_padding=1e9)
POLICIES: dict[str, Policy] = {  # that send fp32 alone, so that weights are those of one process
    "stage 3": preset("exact", memory=ROOMY),
    "stage 2": preset("exact", memory=ROOMY, stage=2),
    "stage 1": preset("exact", memory=ROOMY, stage=1),
    "stage 0": preset("exact", memory=ROOMY, stage=0),
    "hpz": preset("exact", memory=ROOMY, secondary="node"),
    "ring": preset("exact", memory=ROOMY, gather="flat", reduce="ring"),
    "persistent": preset("exact", memory=MemoryLimits(max_padding=1e9, persist_below=20)),
    "offload": preset("exact", memory=ROOMY, offload=Offload(optimizer=1.0, weights=1.0)),
}

Write = Literal["counted", "data copy", "data assigned", "vector", "loaded"]
Buffer = Literal["none", "persistent", "plain", "expanded", "computed"]
Action = Literal[
    "evaluate", "average", "gathered write", "checkpoint", "state", "two losses", "freeze", "none"
]


class Lion(torch.optim.Optimizer):
    """Smooth signs of running means, in place on ``p.data``, as research code is written."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                    p.data.sub_(mean / (mean.abs() + 1e-2), alpha=group["lr"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.05),
    "momentum": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "AdamW": functools.partial(torch.optim.AdamW, lr=0.01, eps=1e-2),
    "fused": functools.partial(torch.optim.AdamW, lr=0.01, eps=1e-2, fused=True),
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=0.01, eps=1e-2),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=0.01, eps=1e-2),
    "Lion": Lion,
    "in place": functools.partial(HalvesGradients, lr=0.05),
    "Lamb": Lamb,
}


@dataclass(frozen=True)
class Step:
    """What a loop does in one step, in this order."""

    action: Action = "none"  # before it trains
    write: Write = "counted"  # how average weights are put in and taken out
    micro_batches: int = 1
    sam: Write | None = None  # how a climb is undone
    keep_gradients: bool = False  # of two losses apart, then add them
    max_norm: float | None = None
    own_clip: bool = False  # by clip_grad_norm_() and optimizer.step(), not by step(max_norm=)
    set_to_none: bool = True


@dataclass(frozen=True)
class Program:
    """A training program; its policy and topology do not change what it trains."""

    policy: str = "stage 3"
    topology: Topology = field(default_factory=lambda: Topology(1, 2))
    optimizer: str = "SGD"
    buffer: Buffer = "none"
    tied: bool = False
    recompute: bool = False
    frozen: bool = False
    engines: int = 1
    optimizers: int = 1
    penalty: bool = False  # on all weights, in the loss
    on_cpu: bool = False  # activations, by torch's own hooks of saved tensors
    scheduled: bool = False  # by MultiStepLR, whose state checkpoints hold
    steps: Sequence[Step] = field(default_factory=lambda: (Step(), Step()))


WRITES = st.sampled_from(["counted", "data copy", "data assigned", "vector"])
STEPS = st.builds(
    Step,
    action=st.sampled_from([*Action.__args__, *(a for a in Action.__args__ if a != "freeze")]),
    write=st.one_of(WRITES, st.just("loaded")),
    micro_batches=st.integers(1, 3),
    sam=st.one_of(st.none(), st.none(), WRITES),
    keep_gradients=st.sampled_from([False, False, True]),
    max_norm=st.sampled_from([None, None, 0.01, 0.5]),
    own_clip=st.booleans(),
    set_to_none=st.booleans(),
)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Programs of two or three steps on up to four ranks."""
    engines = draw(st.sampled_from([1, 1, 2]))
    return Program(
        policy=draw(st.sampled_from(list(POLICIES))),
        topology=draw(st.sampled_from([Topology(1, 2), Topology(2, 1), Topology(1, 3), Topology(2, 2)])),
        optimizer=draw(st.sampled_from([*OPTIMIZERS, *(name for name in OPTIMIZERS if name != "Lamb")])),
        buffer=draw(st.sampled_from(Buffer.__args__)),
        tied=draw(st.booleans()),
        recompute=draw(st.booleans()),
        frozen=draw(st.booleans()),
        engines=engines,
        optimizers=draw(st.integers(1, engines)),
        penalty=draw(st.sampled_from([False, False, False, True])),
        on_cpu=draw(st.sampled_from([False, False, True])),
        scheduled=draw(st.booleans()),
        steps=tuple(draw(st.lists(STEPS, min_size=2, max_size=3))),
    )


class Block(nn.Module):
    """A residual block that may scale its input by a table."""

    def __init__(self, buffer: Buffer, *, recompute: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 11), nn.Linear(11, WIDTH, bias=False)
        self.buffer, self.recompute = buffer, recompute
        table = torch.linspace(0.5, 1.5, WIDTH)
        if buffer != "none":
            table = table[:1].expand(WIDTH) if buffer == "expanded" else table
            self.register_buffer("table", table, persistent=buffer != "plain")

    def body(self, x: Tensor) -> Tensor:
        table = 1.0 if self.buffer == "none" else self.table
        return x + self.down(torch.tanh(self.up(x * table)))

    def forward(self, x: Tensor) -> Tensor:
        if self.buffer == "computed":
            self.table = torch.linspace(0.4, 1.6, WIDTH)
        return checkpoint(self.body, x, use_reentrant=False) if self.recompute else self.body(x)


class Net(nn.Module):
    """(batch, WIDTH) to (batch, WIDTH)."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(program.buffer, recompute=program.recompute) for _ in range(2))
        self.last = nn.Linear(WIDTH, WIDTH)
        if program.tied:
            self.last.weight = self.first.weight
        if program.frozen:
            self.blocks[0].up.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def batch(number: int, rank: int) -> Tensor:
    """(3, WIDTH) data of one rank in one micro-batch."""
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * number + rank))


def chained(nets: Sequence[nn.Module], x: Tensor) -> Tensor:
    for net in nets:
        x = net(x)
    return x


class Side:
    """The models and optimizers of a program, in one process or sharded."""

    ranks: Sequence[int]  # whose batches it sees
    nets: list[nn.Module]
    groups: list[list[nn.Parameter]]  # by model, what an optimizer steps

    def __init__(self, program: Program) -> None:
        self.program = program
        make = OPTIMIZERS[program.optimizer]
        split = program.optimizers == 2
        held = self.groups if split else [[p for group in self.groups for p in group]]
        self.optimizers = [make(parameters) for parameters in held]
        self.schedulers = [MultiStepLR(optimizer, [1, 2], 0.5) for optimizer in self.optimizers]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.groups for parameter in group]

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """Context in which the loss may use weights."""
        return contextlib.nullcontext()

    def loss(self, number: int, rank: int) -> Tensor:
        whole = self.whole() if self.program.penalty else contextlib.nullcontext()
        with save_on_cpu() if self.program.on_cpu else contextlib.nullcontext(), whole:
            loss = chained(self.nets, batch(number, rank)).square().mean()
            if self.program.penalty:
                weights = [p for net in self.nets for p in net.parameters() if p.requires_grad]
                loss = loss + 0.1 * torch.stack([weight.square().sum() for weight in weights]).sum()
        return loss

    def difference(self, number: int, rank: int) -> Tensor:
        """A loss of two forward passes, as of chosen and rejected answers."""
        a, b = (chained(self.nets, batch(number + offset, rank)).mean() for offset in (0, 50))
        return F.softplus(a - b)

    def backward(self, loss: Callable[[int], Tensor], *, last: bool) -> None:
        """Backward of the loss of a rank; ``last`` is the last micro-batch of a step."""
        raise NotImplementedError

    def schedule(self) -> None:
        if self.program.scheduled:
            for scheduler in self.schedulers:
                scheduler.step()

    def freeze(self) -> None:
        """Stop training one weight, which only one process can."""
        self.nets[0].get_parameter("last.bias").requires_grad_(requires_grad=False)

    def zero_grad(self, *, set_to_none: bool) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    @torch.no_grad()
    def evaluate(self) -> Tensor:
        return chained(self.nets, batch(999, 0))


class OneProcess(Side):
    """The program in one process."""

    def __init__(self, program: Program) -> None:
        self.ranks = range(program.topology.world)
        self.nets = nets_of(program)
        self.groups = [[p for p in net.parameters() if p.requires_grad] for net in self.nets]
        super().__init__(program)

    def backward(self, loss: Callable[[int], Tensor], *, last: bool) -> None:
        (torch.stack([loss(rank) for rank in self.ranks]).sum() / len(self.ranks)).backward()

    def step(self, step: Step) -> None:
        if step.max_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters, step.max_norm)
        for optimizer in self.optimizers:
            optimizer.step()

    def state(self) -> list[dict[str, Tensor]]:
        return [{name: value.clone() for name, value in net.state_dict().items()} for net in self.nets]

    def load(self, states: Sequence[dict[str, Tensor]]) -> None:
        for net, state in zip(self.nets, states, strict=True):
            if self.program.buffer == "expanded":  # which torch cannot load; nothing changes its values
                trained = {name: value for name, value in state.items() if not name.endswith("table")}
                net.load_state_dict(trained, strict=False)
            else:
                net.load_state_dict(state)

    def changed(self) -> None:
        """Nothing is to be told."""

    @torch.no_grad()
    def write(self, name: str, factor: float) -> None:
        for net in self.nets:
            net.get_parameter(name).mul_(factor)

    def checkpoint(self) -> None:
        """It goes on from what it saved."""


class Sharded(Side):
    """The program on one rank of an engine for each model."""

    def __init__(self, program: Program, mesh: Mesh, folder: Path) -> None:
        self.ranks, self.mesh, self.folder = [mesh.rank], mesh, folder
        self.nets = nets_of(program)
        policy = POLICIES[program.policy]
        self.zeros: list[Zero] = [shard(net, mesh=mesh, policy=policy) for net in self.nets]
        self.groups = [[p for group in zero.param_groups() for p in group["params"]] for zero in self.zeros]
        super().__init__(program)

    def whole(self) -> contextlib.AbstractContextManager[None]:
        stack = contextlib.ExitStack()
        for zero in self.zeros:
            stack.enter_context(zero.unsharded())
        return stack

    def backward(self, loss: Callable[[int], Tensor], *, last: bool) -> None:
        with contextlib.ExitStack() as stack:
            for zero in self.zeros:
                if not last and not zero.policy.reduces_each_micro_batch:
                    stack.enter_context(zero.accumulating())
            loss(self.mesh.rank).backward()

    def step(self, step: Step) -> None:
        if step.own_clip and step.max_norm is not None and len(self.zeros) == 1:
            self.zeros[0].clip_grad_norm_(step.max_norm)
            for optimizer in self.optimizers:
                optimizer.step()
        else:
            self.zeros[0].step(*self.optimizers, max_norm=step.max_norm)

    def state(self) -> list[dict[str, Tensor]]:
        return [zero.full_state_dict() for zero in self.zeros]

    def load(self, states: Sequence[dict[str, Tensor]]) -> None:
        for zero, state in zip(self.zeros, states, strict=True):
            zero.load_full_state_dict(state)

    def changed(self) -> None:
        for zero in self.zeros:
            zero.weights_changed()

    @torch.no_grad()
    def write(self, name: str, factor: float) -> None:
        for net in self.nets:
            with GatheredParameters(net.get_parameter(name), modifier_rank=0):
                net.get_parameter(name).mul_(factor)

    def checkpoint(self) -> None:
        for number, zero in enumerate(self.zeros):
            optimizers = self.optimizers if len(self.zeros) == 1 else []
            extra = [scheduler.state_dict() for scheduler in self.schedulers]
            save(self.folder / str(number), zero, optimizers, extra=extra)
            loaded = load(self.folder / str(number), zero, optimizers)
            for scheduler, state in zip(self.schedulers, loaded.extra, strict=True):
                scheduler.load_state_dict(state)

    def evaluate(self) -> Tensor:
        try:
            return super().evaluate()
        except ZeroError as error:
            if "zero.weights_changed()" not in str(error):
                raise
        self.changed()  # the way out that the refusal names
        return super().evaluate()


def nets_of(program: Program) -> list[nn.Module]:
    return [model(Net, program=program) for _ in range(program.engines)]


@torch.no_grad()
def put(side: Side, parameters: Sequence[nn.Parameter], values: Sequence[Tensor], write: Write) -> None:
    """Write ``values`` to parameters."""
    pairs = list(zip(parameters, values, strict=True))
    match write:
        case "counted":
            for parameter, value in pairs:
                parameter.copy_(value)
        case "data copy":
            for parameter, value in pairs:
                parameter.data.copy_(value)
        case "data assigned":
            for parameter, value in pairs:
                parameter.data = value.clone()
        case "vector":
            nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(values), parameters)
        case "loaded":
            side.load(side.state())


def average(side: Side, write: Write) -> list[Tensor]:
    """Evaluate with average weights, and with the own ones again."""
    own = [parameter.detach().clone() for parameter in side.parameters]
    put(side, side.parameters, [values * 0.5 for values in own], write)
    seen = [side.evaluate()]
    put(side, side.parameters, own, write)
    return [*seen, side.evaluate()]


def gradients(side: Side, numbers: Iterable[int], loss: Callable[[int, int], Tensor]) -> None:
    """Backward of micro-batches, which add up."""
    numbers = list(numbers)
    for number in numbers:
        side.backward(functools.partial(loss, number), last=number == numbers[-1])


def run(side: Side, program: Program) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Perform a program: the outputs of its evaluations, and the final state of its models."""
    seen: list[Tensor] = []
    for index, step in enumerate(program.steps):
        match step.action:
            case "evaluate":
                seen.append(side.evaluate())
            case "average":
                seen += average(side, step.write)
            case "gathered write":
                side.write("blocks.1.down.weight", 0.9)
            case "checkpoint":
                side.checkpoint()
            case "state":
                side.load(side.state())
            case "freeze":
                side.freeze()
        loss = side.difference if step.action == "two losses" else side.loss
        numbers = range(3 * index, 3 * index + step.micro_batches)
        if step.sam is not None:
            gradients(side, numbers, loss)
            old = [parameter.detach().clone() for parameter in side.parameters]
            climbed = [
                parameter.detach() if parameter.grad is None else parameter.detach() + 0.1 * parameter.grad
                for parameter in side.parameters
            ]
            put(side, side.parameters, climbed, "counted")
            side.zero_grad(set_to_none=step.set_to_none)
            gradients(side, numbers, loss)
            put(side, side.parameters, old, step.sam)
        elif step.keep_gradients:
            gradients(side, numbers, loss)
            kept = [parameter.grad for parameter in side.parameters]
            side.zero_grad(set_to_none=True)
            gradients(side, [number + 20 for number in numbers], loss)
            for parameter, gradient in zip(side.parameters, kept, strict=True):
                if gradient is not None:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        else:
            gradients(side, numbers, loss)
        side.step(step)
        side.schedule()
        side.zero_grad(set_to_none=step.set_to_none)
    seen.append(side.evaluate())
    return seen, side.state()


def on_rank(mesh: Mesh, program: Program, folder: str) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """A program on one rank of an engine."""
    return run(Sharded(program, mesh, Path(folder)), program)
