"""Trains a small GPT on a fake GPU in one process, as rank 0 of 2x2 ranks, and records what happens.

The other ranks do not exist: NCCL hands this rank its own messages in their place.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Final
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: F401  # registers backend "fake"

from harness.suites.trial import Model
from harness.workloads import models
from impl import zero
from impl.adapters.inside_fsdp2 import fsdp2
from impl.comm.mesh import Mesh
from impl.comm.watchdog import Watchdog
from impl.cuda.kernels import Kernels
from impl.policy.policy import MemoryLimits, Offload, Policy
from impl.policy.presets import preset
from impl.policy.topology import Topology
from tests.fake_gpu import emulate, trace

TOPOLOGY: Final = Topology(2, 2)
# Runs of FSDP2: with its own messages, and with ours.
INSIDE_FSDP2: Final = ("fsdp2", "fsdp2+bf16", "fsdp2+qwz+qgz")
MAIN: Final = ("zero3", "zeropp", "fsdp2+qwz+qgz")  # policies whose variants all run
POLICIES: Final = (
    *MAIN, "qwz", "hpz", "qgz", "zeropp-deepspeed", "loco", "sdp4bit", "mxfp8-planes", "mics", "zero2", "zero1",
    "zero3-flat", *INSIDE_FSDP2[:-1],
)  # fmt: skip
_ROOMY: Final = 1e9  # padding that is never refused
_ALL: Final = Offload(optimizer=1.0, weights=1.0)


@dataclass(frozen=True, slots=True)
class Variant:
    """Changes to a policy, and the number of micro-batches of a step."""

    changes: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)  # of memory
    micro_batches: int = 1


VARIANTS: Final = {
    "plain": Variant(),
    "chunks": Variant({"chunks": 3}),
    "offload": Variant({"offload": Offload(optimizer=1.0)}),
    "offload all": Variant({"offload": _ALL}),
    "accumulate": Variant(micro_batches=2),
    "no pairs": Variant(limits={"pair_below": 0}),
    "no prefetch": Variant(limits={"prefetch": 0, "max_reuse": 0, "reduce_bucket": 1}),
    "step": Variant({"reduce_every": "step"}, micro_batches=2),
}


@dataclass(frozen=True, slots=True)
class Setup:
    """How a model is sharded by FSDP2."""

    kept: bool = False  # whether all weights stay gathered until backward
    # of every so many blocks one is gathered asynchronously, ahead of its use; 0: none
    ahead: int = 0
    reduce_dtype: torch.dtype | None = None  # by default that of the weights


SETUPS: Final = {
    "plain": Setup(),
    "kept": Setup(kept=True),
    "ahead": Setup(ahead=1),
    "some ahead": Setup(ahead=2, reduce_dtype=torch.float32),
}


def join_alone(world: int = TOPOLOGY.world, peers: int = 1) -> None:
    """Create the process group of ``world`` ranks of which only this one exists; see ``Option.PEERS``."""
    trace.set_option(trace.Option.PEERS, peers)
    c10d._store_based_barrier = lambda *_, **__: None  # type: ignore[attr-defined]  # the others never come
    Watchdog.meet = lambda *_: None  # type: ignore[method-assign]
    zero.check_same_start = lambda *_: None  # type: ignore[attr-defined]
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:fake,cuda:nccl", store=dist.HashStore(), rank=0, world_size=world)


# The operations of our kernels: the positions of the tensors that they read and write, after ``self``.
TENSORS: Final = {
    "encode": ((1,), (2,)),
    "decode": ((1,), (2,)),
    "decode_sum": ((1,), (2,)),
    "decode_sum_encode": ((2,), (3,)),
    "sums_of_bits": ((0,), ()),
}


def _noting(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
    reads, writes = TENSORS[name]

    @functools.wraps(operation)
    def noted(self: Kernels, *args: Any, **kwargs: Any) -> Any:
        carried = kwargs.get("carried")
        errors = [] if carried is None else [carried.error]
        emulate.note_accesses([args[i] for i in reads], name, writes=False)
        emulate.note_accesses([*(args[i] for i in writes), *errors], name, writes=True)
        return operation(self, *args, **kwargs)

    return noted


@contextlib.contextmanager
def noted_accesses() -> Iterator[trace.Recording]:
    """Record the body, with the accesses of torch's operations and of our kernels."""
    with contextlib.ExitStack() as undo:
        for name in TENSORS:
            undo.enter_context(mock.patch.object(Kernels, name, _noting(name, getattr(Kernels, name))))
        trace.set_option(trace.Option.QUERIES, 0)
        undo.callback(trace.set_option, trace.Option.QUERIES, 1)
        emulate.EMULATION.noting = True
        undo.callback(setattr, emulate.EMULATION, "noting", False)
        with trace.recorded() as recording:
            yield recording


def policy_of(name: str, variant: Variant) -> Policy:
    """Returns a preset with the changes of a variant; raises ValueError if they exclude each other."""
    memory = MemoryLimits(max_padding=_ROOMY, **variant.limits)
    return preset(name, compute="bf16", memory=memory, **variant.changes)


def variants_of(name: str) -> Collection[str]:
    """Returns the names of the variants with which a policy can run."""
    return SETUPS if name in INSIDE_FSDP2 else VARIANTS


def recorded_steps(name: str, variant: str, checkpointed: bool) -> trace.Recording:
    """Record a training step, a forward pass without gradients, and another step.

    Raises ValueError: if the policy and the variant exclude each other.
    """
    if name in INSIDE_FSDP2:
        return _recorded_in_fsdp2(name, SETUPS[variant], checkpointed)
    return _recorded_by_engine(name, VARIANTS[variant], checkpointed)


def _recorded_by_engine(name: str, variant: Variant, checkpointed: bool) -> trace.Recording:
    """Record the passes of :func:`recorded_steps` with our own engine."""
    policy = policy_of(name, variant)
    torch.manual_seed(0)
    model: nn.Module = models.build(Model(name="gpt-tiny", arguments={"layers": 4}), 32).to("cuda")
    if checkpointed:
        models.checkpoint_activations(model)
    engine = zero.shard(model, mesh=Mesh.create(TOPOLOGY, torch.device("cuda", 0)), policy=policy)
    optimizer = torch.optim.AdamW(engine.param_groups(), lr=1e-4, fused=True)
    batch = torch.randint(256, (2, 32), device="cuda")

    def step() -> None:
        for number in range(variant.micro_batches):
            if not policy.reduces_each_micro_batch:
                engine.accumulate(on=number < variant.micro_batches - 1)
            model(batch, batch).backward()
        engine.step(optimizer, max_norm=1.0)
        optimizer.zero_grad()

    with noted_accesses() as recording:
        step()
        with torch.no_grad():
            model(batch, batch)
        step()
    return recording


def _recorded_in_fsdp2(name: str, setup: Setup, checkpointed: bool) -> trace.Recording:
    """Record the passes of :func:`recorded_steps` with FSDP2 in bf16, with two micro-batches in each step.

    ``name`` is ``fsdp2``, which sends its own messages, or ``fsdp2+`` and ``bf16`` or a preset's name.
    """
    torch.manual_seed(0)
    model: Any = models.build(Model(name="gpt-tiny", arguments={"layers": 4}), 32).to("cuda")
    if checkpointed:
        models.checkpoint_activations(model)
    mesh, blocks = init_device_mesh("cuda", (TOPOLOGY.world,)), zero.find_blocks(model)
    types = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=setup.reduce_dtype)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": types}
    options["reshard_after_forward"] = False if setup.kept else None
    for block in (*blocks, model):
        fully_shard(block, **options)
    if setup.ahead:
        for before, block in list(zip([model, *blocks], blocks, strict=False))[:: setup.ahead]:
            block._set_unshard_async_op(True)
            before.set_modules_to_forward_prefetch([block])
    _, _, policy = name.partition("+")
    clip: Callable[[float], object] = lambda _: None  # noqa: E731
    if policy:
        clip = fsdp2(model, Policy() if policy == "bf16" else policy, mesh=TOPOLOGY).clip_grad_norm_
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = torch.randint(256, (2, 32), device="cuda")

    def step() -> None:
        for _ in range(2):
            model(batch, batch).backward()
        clip(1.0)
        optimizer.step()
        optimizer.zero_grad()

    with noted_accesses() as recording:
        step()
        with torch.no_grad():
            model(batch, batch)
        step()
    return recording
