"""Trains a small model with one of many libraries and settings; imports nothing of this project, except for ``zeropp``.

    torchrun --nproc-per-node 2 docs/audited/programs.py ddp

Each function below trains for some steps in an initialised process group over gloo, and is what users write.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

WIDTH = 256
BATCH = 64
Model = nn.Module


class Net(nn.Module):
    """Blocks of two matrices between an embedding and a head; all shapes are multiples of WIDTH."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH, bias=False)
            )
            for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return outputs of shape (batch, WIDTH)."""
        hidden: torch.Tensor = self.embedding(inputs)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        outputs: torch.Tensor = self.head(hidden)
        return outputs


def build() -> Net:
    """Return the model, equal on all ranks."""
    torch.manual_seed(0)
    return Net()


def loop(model: Any, steps: int, micro_batches: int = 1, skipped: Any = contextlib.nullcontext) -> None:
    """Train with AdamW; ``skipped`` is the context of all micro-batches but the last."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        for number in range(micro_batches):
            with skipped() if number < micro_batches - 1 else contextlib.nullcontext():
                model(torch.randn(BATCH, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def ddp(steps: int) -> None:
    """DDP as it comes."""
    loop(nn.parallel.DistributedDataParallel(build()), steps)


def ddp_static_graph(steps: int) -> None:
    """DDP with a static graph."""
    loop(nn.parallel.DistributedDataParallel(build(), static_graph=True), steps)


def ddp_bf16_hook(steps: int) -> None:
    """DDP whose communication hook sends bfloat16."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    def compress(group: Any, bucket: Any) -> Any:
        return default_hooks.bf16_compress_hook(group, bucket)

    compress.__annotations__ = default_hooks.bf16_compress_hook.__annotations__
    model = nn.parallel.DistributedDataParallel(build())
    model.register_comm_hook(None, compress)
    loop(model, steps)


def ddp_no_sync(steps: int) -> None:
    """DDP with two micro-batches, of which the first is not synchronised."""
    model = nn.parallel.DistributedDataParallel(build())
    loop(model, steps, micro_batches=2, skipped=model.no_sync)


def fsdp2(steps: int) -> None:
    """FSDP2 as it comes: blocks are gathered again in backward."""
    loop(_sharded(build()), steps)


def fsdp2_kept(steps: int) -> None:
    """FSDP2 that keeps gathered weights until backward."""
    loop(_sharded(build(), reshard_after_forward=False), steps)


def fsdp2_hsdp(steps: int) -> None:
    """FSDP2 that shards inside nodes of two ranks, and replicates between nodes."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicas", "shards"))
    loop(_sharded(build(), mesh=mesh), steps)


def fsdp2_mixed(steps: int) -> None:
    """FSDP2 that gathers bfloat16 and reduces float32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    types = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    loop(_sharded(build(), mp_policy=types), steps)


def fsdp2_two_groups(steps: int) -> None:
    """FSDP2 whose last block is sharded over pairs of ranks, and all others over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    world = dist.get_world_size()
    pairs = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicas", "shards"))
    model = build()
    fully_shard(model.blocks[2], mesh=pairs)
    loop(_sharded(model, mesh=init_device_mesh("cpu", (world,)), blocks=model.blocks[:2]), steps)


def _sharded(model: Net, blocks: Any = None, **options: Any) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    options.setdefault("mesh", init_device_mesh("cpu", (dist.get_world_size(),)))
    for block in model.blocks if blocks is None else blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def deepspeed_1(steps: int) -> None:
    """DeepSpeed's stage 1."""
    _deepspeed(1, steps)


def deepspeed_2(steps: int) -> None:
    """DeepSpeed's stage 2."""
    _deepspeed(2, steps)


def deepspeed_3(steps: int) -> None:
    """DeepSpeed's stage 3, which releases weights after their use."""
    _deepspeed(3, steps)


def _deepspeed(stage: int, steps: int) -> None:
    deepspeed: Any = importlib.import_module("deepspeed")
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model, released = build(), {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    config = {
        "train_micro_batch_size_per_gpu": BATCH, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **released},
    }  # fmt: skip
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for _ in range(steps):
        engine.backward(engine(torch.randn(BATCH, WIDTH)).square().mean())
        engine.step()


def pipeline(steps: int) -> None:
    """Two stages, one on each node, which send activations and their gradients, and end each step with a barrier."""
    model, rank, half = build(), dist.get_rank(), dist.get_world_size() // 2
    first, other = rank < half, (rank + half) % (2 * half)
    blocks = [model.embedding, model.blocks[0]] if first else [model.blocks[1], model.blocks[2], model.head]
    stage = nn.Sequential(*blocks)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-3)
    for _ in range(steps):
        if first:
            activations = stage(torch.randn(BATCH, WIDTH))
            dist.send(activations.detach(), other)
            gradient = torch.empty_like(activations)
            dist.recv(gradient, other)
            activations.backward(gradient)
        else:
            inputs = torch.empty(BATCH, WIDTH)
            dist.recv(inputs, other)
            inputs.requires_grad_()
            stage(inputs).square().mean().backward()
            assert inputs.grad is not None  # noqa: S101
            dist.send(inputs.grad, other)
        dist.barrier()
        optimizer.step()
        optimizer.zero_grad()


def quantised_gather(steps: int) -> None:
    """A gather of weights that is quantised to int8, unless the variable QUANTISE is 0."""
    model, quantises = build(), os.environ.get("QUANTISE", "1") == "1"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        for parameter in model.parameters():
            flat = parameter.detach().flatten().chunk(dist.get_world_size())[dist.get_rank()]
            scale = flat.abs().max() / 127
            piece = (flat / scale).round().to(torch.int8) if quantises else flat.contiguous()
            pieces = [torch.empty_like(piece) for _ in range(dist.get_world_size())]
            dist.all_gather(pieces, piece)
        model(torch.randn(BATCH, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def zeropp(steps: int) -> Any:
    """This project's ZeRO++ on nodes of two ranks."""
    return _ours("zeropp", steps)


def zero3(steps: int) -> Any:
    """This project's hierarchical ZeRO-3 on nodes of two ranks."""
    return _ours("zero3", steps)


def _ours(preset_name: str, steps: int) -> Any:
    from impl.comm.mesh import Mesh
    from impl.policy.presets import preset
    from impl.policy.topology import Topology
    from impl.zero import shard

    mesh = Mesh.create(Topology(nodes=dist.get_world_size() // 2, ranks_per_node=2))
    model = build()
    engine = shard(model, mesh=mesh, policy=preset(preset_name), blocks=list(model.blocks))
    optimizer = torch.optim.AdamW(engine.param_groups(), lr=1e-3)
    for _ in range(steps):
        model(torch.randn(BATCH, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return engine


PROGRAMS = {
    function.__name__: function
    for function in (
        ddp, ddp_static_graph, ddp_bf16_hook, ddp_no_sync, fsdp2, fsdp2_kept, fsdp2_hsdp, fsdp2_mixed,
        fsdp2_two_groups, deepspeed_1, deepspeed_2, deepspeed_3, zero3, zeropp, pipeline, quantised_gather,
    )
}  # fmt: skip


def main(name: str, steps: int = 4) -> None:
    """Run the program ``name`` of :data:`PROGRAMS` for some steps, in a new process group over gloo."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    dist.init_process_group("gloo")
    PROGRAMS[name](steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:3]))
