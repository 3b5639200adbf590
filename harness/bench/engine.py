"""``zeropp bench engine``: times training steps of our engine beside those of its peers, interleaved.

All contenders live in the same processes: each has its own copy of the same model, sees the same batches of
real text, and steps the same AdamW.  In each round each trains a few steps in its turn, after a barrier; the
turns rotate from round to round.  A round's seconds are the slowest rank's.  Nothing is clipped.

Peers stand as their libraries ship them, and tuned (``harness.suites.peers``); over gloo, as they send.  Ours
stand first over gloo alone, which is their footing, then with shared memory inside nodes.  All compute in
fp32, or all in bf16 with fp32 masters.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from harness.bench.rounds import interleaved
from harness.cluster.rank import Rank
from harness.records.bench_record import CPU, Sample
from harness.strategies import deepspeed, torch_peers
from harness.suites.peers import PEERS, Compute, configuration
from harness.suites.trial import Model
from harness.workloads import corpus
from harness.workloads.models import build
from impl.comm.mesh import Mesh
from impl.comm.wire import Transport, Wire
from impl.plan.policy import preset
from impl.zero import shard

SEQUENCE: Final = 128
SEQUENCES: Final = 4
STEPS: Final = 3  # of each contender in a round
ROUNDS: Final = (5, 40)
LOSS_TOLERANCE: Final[dict[Compute, float]] = {"fp32": 1e-3, "bf16": 2e-2}
"""Largest relative difference of two contenders' losses in a step: what the order of sums in that type makes
of AdamW's steps, far below what a lost or doubled gradient does (docs/reference/metrics.md)."""

ALONE: Final = "alone"  # computes, and sends nothing
_CARRIED: Final[dict[str, Transport]] = {"-gloo": "backend", "": "shm"}
OURS: Final[dict[str, tuple[str, Transport]]] = {
    f"{policy}{suffix}": (policy, transport)
    for suffix, transport in _CARRIED.items()
    for policy in ("exact", "zero3", "zeropp")
}
"""Preset and transport by the name of the run, those on the peers' own transport first."""

DEEPSPEED: Final = tuple(name for name, peer in PEERS.items() if peer.family == "deepspeed")
NAMES: Final = (ALONE, *(name for name, peer in PEERS.items() if peer.family != "single"), *OURS)
LIKE: Final[dict[Compute, str]] = {"fp32": "exact", "bf16": "zero3"}
"""Our policy that sends weights and gradients in the type that peers compute and send in."""
IN_16_BITS: Final = ("ddp-bf16", "zero3", "bf16")
"""Contenders, and types computed in, whose losses are held to bf16's tolerance."""

Batch = tuple[Tensor, Tensor]  # tokens and targets, each (sequences, T)


@dataclass(slots=True)
class Contender:
    """One contender: a strategy with its own copy of the model."""

    name: str  # of :data:`NAMES`
    step: Callable[[Tensor, Tensor], Tensor]  # one training step; () the loss before it
    told: dict[str, Any]  # how it was set up
    losses: list[float] = field(default_factory=list)  # this rank's, so far

    def round(self, batches: Sequence[Batch]) -> tuple[float, float]:
        """Train on each batch; seconds on this rank, and CPU seconds of its process."""
        begin, computed = time.perf_counter(), time.process_time()
        losses = [self.step(*batch) for batch in batches]
        took = time.perf_counter() - begin, time.process_time() - computed
        self.losses += [float(loss) for loss in losses]
        return took


def usual(compute: Compute, nodes: int) -> tuple[str, ...]:
    """The contenders of a run in which none are asked for: compute alone, all peers, of ours the policy that
    sends in the peers' type, and ZeRO++.  DeepSpeed's hpZ, a copy in each node, where there are several.
    """
    unlike = {policy for kind, policy in LIKE.items() if kind != compute}
    return tuple(
        name
        for name in NAMES
        if OURS.get(name, ("",))[0] not in unlike and not (nodes == 1 and name in PEERS and PEERS[name].hpz)
    )


def measure(
    rank: Rank, *, names: Sequence[str], model: str, compute: Compute, seconds: float
) -> list[Sample]:
    """Train everything for about ``seconds``; the target of every rank.  Seconds and losses are this rank's
    alone; ``names`` are of :data:`NAMES`, the first is :data:`ALONE`, and ``model`` is a preset.
    """
    # torch 2.13 renames two collectives that FSDP2 and DeepSpeed still call by their old names.
    warnings.filterwarnings("ignore", category=FutureWarning)
    mesh = Mesh.create(rank.topology)
    contenders = [_contender(name, mesh, model, compute) for name in names]
    batch = batches_of(rank, SEQUENCES)
    took = interleaved(
        rank,
        [each.round for each in contenders],
        "rounds",
        ROUNDS,
        lambda index: [batch(index * STEPS + number) for number in range(STEPS)],
        seconds=seconds,
    )
    by_round = [[whole for whole, _ in rounds] for rounds in took]
    tokens = mesh.topology.world * SEQUENCES * SEQUENCE * STEPS
    parameters = sum(parameter.numel() for parameter in model_of(model).parameters())
    # The one learns from its own batches alone, the others quantise.
    equal = {ALONE: 1, "zeropp": 0, "zeropp-gloo": 0}
    samples = []
    for each, mine, rounds in zip(contenders, by_round, took, strict=True):
        policy, transport = OURS.get(each.name, (each.name, "none" if each.name == ALONE else "backend"))
        samples.append(
            Sample(
                kind="training",
                names={
                    "contender": policy, "transport": transport, "model": model,
                    "sequence": SEQUENCE, "sequences": SEQUENCES, "compute": compute,
                },
                sizes={"parameters": parameters, "tokens": tokens, "steps": STEPS},
                seconds=mine,
                reference_seconds=by_round[0],
                parts={CPU: [computed for _, computed in rounds]},
                losses=each.losses,
                equal_steps=equal.get(each.name, len(each.losses)),
                told=each.told,
            )
        )  # fmt: skip
    return samples


def unequal(samples: Sequence[Sample]) -> str | None:
    """A message on contenders whose losses differ from those of the first exact contender; None if none do.

    Each is compared in the steps that it says must be equal
    (:attr:`~harness.records.bench_record.Sample.equal_steps`).
    """
    for sample in samples:
        here = (other for other in samples if other.setting == sample.setting)
        first = next((other for other in here if other.equal_steps == len(other.losses)), sample)
        pairs = zip(sample.losses[: sample.equal_steps], first.losses, strict=False)
        named = {str(one.names[key]) for one in (sample, first) for key in ("contender", "compute")}
        tolerance = LOSS_TOLERANCE["bf16" if named & set(IN_16_BITS) else "fp32"]
        for step, (loss, expected) in enumerate(pairs):
            if not abs(loss - expected) <= tolerance * abs(expected):  # NaN is not equal either
                nodes, ranks, _ = sample.place
                one, other = (f"{x.names['contender']} over {x.names['transport']}" for x in (sample, first))
                return (
                    f"{one} has loss {loss:.6g} in step {step} on {nodes}x{ranks} ranks, {other} "
                    f"{expected:.6g}: more than {tolerance:g} apart, so they do not train the same"
                )
    return None


def batches_of(rank: Rank, sequences: int) -> Callable[[int], Batch]:
    """Batches of text by step, for this rank, of ``sequences`` sequences."""
    found = corpus.load(corpus.STDLIB)
    assert isinstance(found, corpus.Corpus)  # noqa: S101  # it is text
    text = corpus.Text(found, SEQUENCE)

    def batch(step: int) -> Batch:
        read, answer = text.batch(seed=0, step=step, micro_batch=0, rank=rank.rank, sequences=sequences)
        return torch.tensor(read), torch.tensor(answer)

    return batch


def model_of(name: str, **arguments: int) -> nn.Module:
    """Build a preset's model, equal on every rank and for every contender."""
    torch.manual_seed(0)
    return build(Model(name=name, arguments=arguments), SEQUENCE)


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of every contender."""
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def _contender(name: str, mesh: Mesh, preset_name: str, compute: Compute) -> Contender:
    """Build a contender; all ranks must call it."""
    model, told = model_of(preset_name), {"optimizer": "fused AdamW"}
    if name in DEEPSPEED:
        return Contender(name, *_by_deepspeed(name, model, mesh, compute))
    if name in OURS:
        policy, transport = OURS[name]
        asked = preset(policy, compute=compute)
        zero = shard(model, mesh=mesh, policy=asked, wire=Wire(mesh, transport=transport))
        step = _trained(model, optimizer_of(zero.param_groups()), zero.finish_backward)
        return Contender(name, step, told | {"preset": policy})
    if name == ALONE:
        return Contender(name, _alone(model, compute), told)
    model = torch_peers.wrapped(PEERS[name], model, mesh.device, compute)
    told |= torch_peers.algorithms(PEERS[name], compute)
    return Contender(name, _trained(model, optimizer_of(model.parameters())), told)


def _alone(model: nn.Module, compute: Compute) -> Callable[[Tensor, Tensor], Tensor]:
    """A step of compute alone.  In bf16 with fp32 masters, as ours and FSDP2 keep them: weights are cast once
    a step, not in each use of them as autocast does.
    """
    if compute == "fp32":
        return _trained(model, optimizer_of(model.parameters()))
    masters = [nn.Parameter(weight.detach().clone()) for weight in model.parameters()]
    weights = list(model.bfloat16().parameters())

    def hand_over() -> None:
        for master, weight in zip(masters, weights, strict=True):
            master.grad, weight.grad = None if weight.grad is None else weight.grad.float(), None

    @torch.no_grad()
    def hand_back() -> None:
        for master, weight in zip(masters, weights, strict=True):
            weight.copy_(master)

    return _trained(model, optimizer_of(masters), hand_over, hand_back)


def _by_deepspeed(
    name: str, model: nn.Module, mesh: Mesh, compute: Compute
) -> tuple[Callable[[Tensor, Tensor], Tensor], dict[str, Any]]:
    """A training step by DeepSpeed, and its configuration; by its own default it clips at 1.0."""
    config = {
        **configuration(PEERS[name], mesh.topology.ranks_per_node),
        "train_micro_batch_size_per_gpu": SEQUENCES,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": compute == "bf16"},
    }
    engine = deepspeed.initialised(model, optimizer_of(model.parameters()), config, mesh.device)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step, config


def _trained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    finish: Callable[[], None] = lambda: None,
    stepped: Callable[[], None] = lambda: None,
) -> Callable[[Tensor, Tensor], Tensor]:
    """A step of a model in a plain torch training loop; ``finish`` follows backward, ``stepped`` the step."""

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model(tokens, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        finish()
        optimizer.step()
        optimizer.zero_grad()
        stepped()
        return loss.detach()

    return step
