"""Counts what the host asks of a GPU in one training step: launches, copies, events, waits and NCCL calls.

It also adds up the bytes that operations of a forward and a backward pass read and write in the GPU's memory, without
those of NCCL.

``python -m tests.fake_gpu.count`` counts rank 0 of 2x8 ranks that train gpt-1.5b with 4,096 tokens a rank and
activation checkpointing.  No value is computed and no message is sent, so the model needs neither memory nor time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tests.fake_gpu import build
from tests.fake_gpu.trace import Kind

ENGINES: Final = ("single", "fsdp2", "fsdp2+qwz+qgz", "zero3", "zeropp")
COLUMNS: Final = {
    "kernels": Kind.KERNEL, "products": Kind.PRODUCT, "codecs": Kind.CODEC, "copies": Kind.COPY, "sets": Kind.SET,
    "events": Kind.RECORD, "waits": Kind.WAIT, "NCCL": Kind.NCCL, "syncs": Kind.SYNC_STREAM,
}  # fmt: skip
MOVED: Final = "bytes"  # key of the bytes in counts
_LAUNCHES: Final = ("kernels", "products", "codecs", "copies", "sets")
# At most: launches, and bytes for each parameter, beyond those of the model alone ("single"); and events recorded: two
# for each call of NCCL, which are torch's, and two for each reduction and each pair of gathers, before and after it.
BARS: Final[dict[str, Mapping[str, float]]] = {
    "zero3": {"added": 500, "added B": 20, "events": 594},
    "zeropp": {"added": 600, "added B": 18, "events": 546},
}


def count(engine: str, nodes: int, per_node: int, model_name: str, tokens: int) -> dict[str, int]:
    """Returns the calls of the third step, by column of the table."""
    import torch

    from harness.suites.trial import Model
    from harness.workloads import models
    from impl import ops, zero
    from impl.adapters.inside_fsdp2 import fsdp2
    from impl.comm.mesh import Mesh
    from impl.policy.presets import preset
    from impl.policy.topology import Topology
    from tests.fake_gpu import engine_runs, moved, trace

    engine_runs.join_alone(nodes * per_node, peers=2)
    trace.set_option(trace.Option.COPIES, 0)
    device = torch.device("cuda", 0)
    ops.prepare = lambda *_: None
    with models.unfilled():
        model = models.build(Model(name=model_name), 1024)
    model = model.to_empty(device=device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    models.checkpoint_activations(model)
    masters: Any
    if engine == "single":
        masters = model.to(torch.bfloat16).parameters()
    elif engine.startswith("fsdp2"):
        masters = _in_fsdp2(model, nodes * per_node).parameters()
        if policy := engine.partition("+")[2]:
            fsdp2(model, policy, mesh=Topology(nodes, per_node))
    else:
        mesh = Mesh.create(Topology(nodes, per_node), device)
        masters = zero.shard(model, mesh=mesh, policy=preset(engine, compute="bf16")).param_groups()
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)
    batch = torch.zeros(max(1, tokens // 1024), min(tokens, 1024), dtype=torch.int64, device=device)
    for _ in range(3):
        trace.reset_counts()
        model(batch, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    counts = trace.counts()
    with moved.counted() as bytes_moved:
        model(batch, batch).backward()
    numbers = {name: counts[kind] for name, kind in COLUMNS.items()}
    return numbers | {MOVED: bytes_moved.nbytes, "parameters": parameters}


def _in_fsdp2(model: Any, world: int) -> Any:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from impl.zero import find_blocks

    mesh, mixed = init_device_mesh("cuda", (world,)), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in find_blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=mixed)
    return fully_shard(model, mesh=mesh, mp_policy=mixed)


def counted_apart(engine: str, arguments: Sequence[str] = ()) -> dict[str, int]:
    """Count in a process of its own, on a fake GPU without values.

    Raises RuntimeError: if it fails.
    """
    command = [sys.executable, "-m", "tests.fake_gpu.count", "--only", engine, *arguments]
    environment = build.environment(1, values=False)
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if process.returncode:
        raise RuntimeError(f"the count of {engine} failed:\n{process.stderr[-3000:]}")
    counts: dict[str, int] = json.loads(process.stdout.splitlines()[-1])
    return counts


def table(counted: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Returns the lines of the table; ``counted`` has the counts by engine."""
    every = figures(counted)
    heads = (*COLUMNS, *next(iter(every.values())))
    lines = [f"{'':14}" + "".join(f"{name:>10}" for name in heads)]
    for engine, counts in counted.items():
        line = f"{engine:14}" + "".join(f"{counts[name]:>10,}" for name in COLUMNS)
        for figure in every[engine].values():
            line += f"{figure:>10,.1f}" if isinstance(figure, float) else f"{figure:>10,}"
        lines.append(line)
    return [
        *lines,
        "added: beyond those of the model alone; B: bytes for each parameter, of forward and backward",
    ]


def figures(counted: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, float]]:
    """Returns the figures that have bars, by engine: what an engine adds to the model alone, and its events."""
    alone = counted["single"]
    return {
        engine: {
            "added": sum(counts[name] - alone[name] for name in _LAUNCHES),
            "added B": (counts[MOVED] - alone[MOVED]) / counts["parameters"],
            "events": counts["events"],
        }
        for engine, counts in counted.items()
    }


def above(counted: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Returns a line for each figure that is above its bar."""
    every = figures(counted)
    return [
        f"{engine}: {name} {every[engine][name]:,.4g}, at most {bar:,}"
        for engine, bars in BARS.items()
        for name, bar in (bars.items() if engine in every else ())
        if every[engine][name] > bar
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of all engines."""
    parser = argparse.ArgumentParser(prog="python -m tests.fake_gpu.count", description=__doc__)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--model", default="gpt-1.5b")
    parser.add_argument("--tokens", type=int, default=4096, help="of a rank")
    parser.add_argument("--only", choices=ENGINES, help="print the counts of one engine as JSON")
    options = parser.parse_args(arguments)
    if options.only is not None:
        counts = count(options.only, options.nodes, options.ranks_per_node, options.model, options.tokens)
        print(json.dumps(counts), flush=True)
        os._exit(0)  # nobody joins the process group's end
    given = list(sys.argv[1:] if arguments is None else arguments)
    counted = {engine: counted_apart(engine, given) for engine in ENGINES}
    print(*table(counted), *(wrong := above(counted)), sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
