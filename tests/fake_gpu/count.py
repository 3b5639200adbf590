"""Counts what the host asks of a GPU in one training step: launches, copies, events, waits and NCCL calls.

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
_LAUNCHES: Final = ("kernels", "products", "codecs", "copies", "sets")
# At most: launches beyond those of the model alone ("single"), and events recorded.
BARS: Final[dict[str, Mapping[str, int]]] = {
    "zero3": {"launches": 700, "events": 700},
    "zeropp": {"launches": 800, "events": 700},
}


def count(engine: str, nodes: int, per_node: int, model_name: str, tokens: int) -> dict[str, int]:
    """Returns the calls of the third step, by column of the table."""
    import torch

    from harness.suites.trial import Model
    from harness.workloads import models
    from impl import ops, zero
    from impl.adapters.inside_fsdp2 import fsdp2
    from impl.comm.mesh import Mesh
    from impl.plan.policy import preset
    from impl.plan.topology import Topology
    from tests.fake_gpu import engine_runs, trace

    engine_runs.join_alone(nodes * per_node, peers=2)
    trace.set_option(trace.Option.COPIES, 0)
    device = torch.device("cuda", 0)
    ops.prepare = lambda *_: None
    with models.unfilled():
        model = models.build(Model(name=model_name), 1024)
    model = model.to_empty(device=device)
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
    return {name: counts[kind] for name, kind in COLUMNS.items()}


def _in_fsdp2(model: Any, world: int) -> Any:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from impl.zero import find_blocks

    mesh, mixed = init_device_mesh("cuda", (world,)), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in find_blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=mixed)
    return fully_shard(model, mesh=mesh, mp_policy=mixed)


def _counted_apart(engine: str, arguments: Sequence[str]) -> dict[str, int]:
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
    alone = sum(counted["single"][name] for name in _LAUNCHES)
    lines = [
        f"{'':14}" + "".join(f"{name:>10}" for name in (*COLUMNS, "launches")) + "  added launches, events"
    ]
    for engine, counts in counted.items():
        launches = sum(counts[name] for name in _LAUNCHES)
        line = f"{engine:14}" + "".join(f"{counts[name]:>10,}" for name in COLUMNS) + f"{launches:>10,}"
        figures = {"launches": launches - alone, "events": counts["events"]}
        if (bars := BARS.get(engine)) is not None:
            shown = (
                f"{figures[name]:,} ({'within' if figures[name] <= bar else 'above'} {bar})"
                for name, bar in bars.items()
            )
            line += "  " + ", ".join(shown)
        lines.append(line)
    return lines


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
    print(*table({engine: _counted_apart(engine, given) for engine in ENGINES}), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
