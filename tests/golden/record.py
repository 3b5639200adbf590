"""Computes the golden file: ids of trials, every rank's ledger, and losses to the last bit.

``python -m tests.golden.record`` writes ``golden.json.gz`` anew.  Do so only in a change that is meant to
alter ids, bytes or arithmetic, and say which and why in it: the file shows every such change.

Everything that a run depends on is here, models and loops too, so that a change of other tests' models
leaves the file as it is.  All fields of ``MemoryLimits`` whose defaults may change are set.
"""

from __future__ import annotations

import copy
import gzip
import json
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from harness.measure.machine import _cpu_model
from harness.suites.trial import Cluster, Trial
from impl.codecs.codec import Dtype
from impl.comm.mesh import Mesh
from impl.comm.wire import Wire
from impl.policy.policy import MemoryLimits, Policy, parse_feedback, parse_loss_scale
from impl.policy.presets import PRESETS, preset
from impl.policy.topology import Topology
from impl.zero import shard

FILE: Final = Path(__file__).with_name("golden.json.gz")
TOPOLOGIES: Final = (Topology(2, 2), Topology(3, 2))
STEPS: Final = 2
_LIMITS: Final = MemoryLimits(max_padding=1e9, max_reuse=0)
_WIDTH: Final = 64

# Combinations that suites ask for, as the fields of a trial: (strategy, policy).
SUITES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "ring": ("zeropp", {"gradients": "bf16", "reduce": "ring"}),
    "one_hop": ("zeropp", {"gradients": "int4:128", "reduce": "one_hop"}),
    "two_hop in 4 chunks": ("zeropp", {"gradients": "int4:128", "chunks": 4}),
    "flat": ("zero3", {"gather": "flat"}),
    "every rank its own secondary": ("zeropp", {"secondary": 1}),
    "loco": ("qgz", {"gradients": "int4:128", "feedback": "loco"}),
    "classic on all hops": ("qgz", {"gradients": "int2:128", "feedback": "classic:all"}),
    "rounded at random": ("qgz", {"gradients": "mxfp4:stochastic", "weights": "int4:256:asym"}),
    "rotated": ("qgz", {"gradients": "int4:128:hadamard32:stochastic"}),
    "fp8": ("zeropp", {"weights": "fp8e4m3:128", "gradients": "fp8e5m2:128"}),
    "offloaded": ("zeropp", {"offload_optimizer": 1.0, "offload_weights": 1.0}),
    "half offloaded": ("zero3", {"offload_optimizer": 0.5}),
    "kept for backward": ("zeropp", {"max_reuse": 10**9}),
    "small parameters stay": ("zeropp", {"persist_below": 100}),
    "reduced once a step": ("zeropp", {"reduce_every": "step"}),
    "quantised stage 2": ("zero2", {"weights": "int8:2048", "gradients": "int4:256"}),
}


class Block(nn.Module):
    """A residual block with parameters of whole codec blocks of 2048, or ragged ones."""

    def __init__(self, *, ragged: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH) if ragged else nn.Identity()
        self.up = nn.Linear(_WIDTH, 2 * _WIDTH, bias=ragged)
        self.down = nn.Linear(2 * _WIDTH, _WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return x + hidden


class Net(nn.Module):
    """Embedding, two blocks, head; ``ragged`` with norms and biases, which start on new codec blocks."""

    def __init__(self, *, ragged: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(32, _WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block(ragged=ragged) for _ in range(2))
        self.head = nn.Linear(_WIDTH, 32, bias=ragged)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 32) to a loss."""
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        loss: Tensor = (self.head(x).float() - 1.0).square().mean()
        return loss


def _nets() -> tuple[Net, Net]:
    """With whole blocks, ragged; made once, since thread ranks share torch's generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net(ragged=False), Net(ragged=True)


_NETS: Final = _nets()


def policies() -> dict[str, Policy]:
    """Every preset, then the suites' combinations; all limits that matter are named."""
    recorded = {name: preset(name, memory=_LIMITS) for name in PRESETS}
    for name, (strategy, changes) in SUITES.items():
        policy = Trial(strategy=strategy, policy=changes).resolved_policy() or Policy()
        limits = {key: value for key, value in changes.items() if key in ("max_reuse", "persist_below")}
        recorded[name] = replace(policy, memory=replace(_LIMITS, **limits))
    recorded["fp16, scaled"] = preset(
        "zeropp", memory=_LIMITS, compute="fp16", loss_scale=parse_loss_scale("dynamic:from1024")
    )
    recorded["frozen codec, LoCo in bf16"] = preset(
        "zeropp", memory=_LIMITS, feedback=parse_feedback("loco:bf16")
    )
    return recorded


def trials() -> dict[str, str]:
    """Id of a trial for every preset and combination, on both topologies, with its transport named."""
    combinations = {name: (name, {}) for name in PRESETS} | SUITES
    return {
        f"{topology} {transport} {name}": Trial(
            strategy=strategy,
            policy=changes,
            cluster=Cluster(
                nodes=topology.nodes, ranks_per_node=topology.ranks_per_node, transport=transport
            ),
        ).id
        for topology in TOPOLOGIES
        for transport in ("shm", "gloo")
        for name, (strategy, changes) in combinations.items()
    }


def run(mesh: Mesh, transport: str, policy: Policy, *, ragged: bool, steps: int = STEPS) -> dict[str, Any]:
    """Train on one rank, in fp32 with two micro-batches a step and clipping; its ledger and losses."""
    net = copy.deepcopy(_NETS[ragged])
    wire = Wire(mesh, transport=transport)  # type: ignore[arg-type]
    zero = shard(net, mesh=mesh, policy=policy, wire=wire, seed=7)
    optimizer = torch.optim.AdamW(zero.param_groups(), lr=1e-2)
    micro_batches = 2 if policy.compute == "fp32" else 1
    losses: list[str] = []
    for step in range(steps):
        for micro in range(micro_batches):
            if not policy.reduces_each_micro_batch:
                zero.accumulate(on=micro < micro_batches - 1)
            seed = 1000 * step + 100 * micro + mesh.rank
            loss = net(torch.randn(4, 32, generator=torch.Generator().manual_seed(seed)))
            zero.scaler.scaled(loss).backward()
            losses.append(float(loss.detach()).hex())
        zero.step(optimizer, max_norm=1.0 if policy.compute == "fp32" else None)
        optimizer.zero_grad()
    with torch.no_grad():
        losses.append(float(net(torch.ones(1, 32))).hex())
    ledger = sorted([*key, *sent] for key, sent in wire.ledger.rows().items())
    wire.close()
    return {"ledger": ledger, "losses": losses}


def all_runs(mesh: Mesh) -> dict[str, Any]:
    """Every preset in fp32 and bf16 on one rank; on 3x2 also the ragged model, and the combinations."""
    torch.set_num_threads(1)
    runs: list[tuple[str, Policy, bool]] = []
    for name, policy in policies().items():
        kinds: list[Dtype] = ["fp32", "bf16"] if name in PRESETS else [policy.compute]
        runs += [(name, replace(policy, compute=compute), False) for compute in kinds]
        if name in PRESETS:
            runs.append((name, policy, True))
    if mesh.topology != TOPOLOGIES[-1]:
        runs = [(name, policy, ragged) for name, policy, ragged in runs if name in PRESETS and not ragged]
    return {
        f"{name}, {policy.compute}, {'ragged' if ragged else 'whole blocks'}": run(
            mesh, "backend", policy, ragged=ragged
        )
        for name, policy, ragged in runs
    }


def zeropp(mesh: Mesh, transport: str) -> dict[str, Any]:
    """One run of :func:`all_runs`: ZeRO++ in fp32."""
    torch.set_num_threads(1)
    return {"zeropp, fp32, whole blocks": run(mesh, transport, policies()["zeropp"], ragged=False)}


def merged(topology: Topology, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The runs of one topology: losses by rank, and every ledger with the ranks that have it."""
    by_key = {}
    for key in ranks[0]:
        ledgers: dict[str, list[int]] = {}
        for rank, runs in enumerate(ranks):
            ledgers.setdefault(json.dumps(runs[key]["ledger"]), []).append(rank)
        by_key[f"{topology} {key}"] = {
            "ledgers": [[ranks_of, json.loads(text)] for text, ranks_of in ledgers.items()],
            "losses": [runs[key]["losses"] for runs in ranks],
        }
    return by_key


def fingerprint() -> dict[str, str]:
    """Processor, instruction set and torch, on which the last bits of a matrix product depend."""
    return {
        "processor": _cpu_model() or platform.processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }


def load() -> dict[str, Any]:
    golden: dict[str, Any] = json.loads(gzip.decompress(FILE.read_bytes()))
    return golden


def _main() -> None:
    from tests.support.ranks import on_threads

    runs: dict[str, Any] = {}
    for topology in TOPOLOGIES:
        runs |= merged(topology, on_threads(topology, all_runs))
    data = {"machine": fingerprint(), "elsewhere": {}, "trials": trials(), "runs": runs}
    text = json.dumps(data, separators=(",", ":"), sort_keys=True)
    FILE.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{FILE.name}: {len(data['trials'])} ids, {len(runs)} runs, {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    _main()
