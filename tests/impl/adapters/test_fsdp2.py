"""``fsdp2(model, policy)``: it trains as our engine does, counts its bytes, and orders its accesses of memory."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from impl.adapters.inside_fsdp2 import InFSDP2, fsdp2
from impl.adapters.traffic import HostError
from impl.codecs.codec import parse
from impl.comm.mesh import Mesh
from impl.comm.wire import Wire
from impl.plan.traffic import Event, Sent
from impl.policy.policy import BitBudget, Offload, Policy, PolicyError
from impl.policy.presets import preset
from impl.policy.topology import Topology
from impl.transport.group import MeshError
from impl.transport.side_stream import Arrival
from impl.zero import shard
from tests.support.params import long
from tests.support.ranks import each_rank, on_processes
from tests.support.strategies import ROOMY
from tests.support.stream_order import Detector, RaceError, in_fsdp2, on_streams

WIDTH, DEPTH, STEPS, MICRO_BATCHES = 64, 3, 3, 2
POLICY = Policy(weights=parse("int8:64"), gradients=(parse("int4:32"),) * 2)
SHARD = WIDTH * WIDTH // 4  # elements of a matrix on each of four ranks
GATHERED = SHARD + 4 * SHARD // 64  # bytes of int8 codes, and one fp32 scale for each block of 64
REDUCED = SHARD // 2 + 4 * SHARD // 32  # bytes of int4 codes, and one fp32 scale for each block of 32


class Matrix(nn.Module):
    """A residual block of one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.weight)


class Matrices(nn.Module):
    """Blocks of one matrix each, and a head of one matrix.

    A rank's rows of a matrix are neighbouring elements, so that FSDP2 and our engine cut such a unit alike.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Matrix() for _ in range(DEPTH))
        self.head = nn.Parameter(torch.randn(WIDTH, WIDTH) / 16)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) to a loss."""
        for block in self.blocks:
            x = block(x)
        return (x @ self.head).square().mean()


@dataclass(frozen=True)
class Setup:
    """How a model is sharded by FSDP2, and with which policy it sends; without a policy FSDP2 sends by itself."""

    policy: Policy | None = POLICY
    kept: bool = False  # whether all weights stay gathered until backward
    ahead: bool = False  # whether blocks are gathered asynchronously, ahead of their use
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None


def sharded(world: int, setup: Setup) -> Any:
    """Return a model in FSDP2, with equal values on every rank."""
    # torch 2.13 renames two collectives that its own FSDP2 still calls by their old names.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    torch.manual_seed(5)
    model: Any = Matrices()
    mesh = init_device_mesh("cpu", (world,))
    types = MixedPrecisionPolicy(param_dtype=setup.param_dtype, reduce_dtype=setup.reduce_dtype)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=types, reshard_after_forward=False if setup.kept else None)
    if setup.ahead:
        model._set_unshard_async_op(True)
        for before, block in zip([model, *model.blocks], model.blocks, strict=False):
            before.set_modules_to_forward_prefetch([block])
    return model


def batch(number: int, rank: int) -> Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(50 * number + rank))


def trained(
    model: nn.Module, rank: int, parameters: Any, step: Callable[[torch.optim.Optimizer], object]
) -> list[float]:
    """Evaluate once, then train a few steps with AdamW; returns the loss of every micro-batch."""
    optimizer, losses = torch.optim.AdamW(parameters, lr=1e-2), []
    with torch.no_grad():
        model(batch(99, rank))
    for number in range(STEPS * MICRO_BATCHES):
        loss = model(batch(number, rank))
        loss.backward()
        losses.append(loss.item())
        if number % MICRO_BATCHES == MICRO_BATCHES - 1:
            step(optimizer)
            optimizer.zero_grad()
    return losses


def in_fsdp2_trained(mesh: Mesh, setup: Setup) -> tuple[list[float], InFSDP2 | None]:
    model = sharded(mesh.topology.world, setup)
    # By default all ranks of one machine share a node.
    topology = mesh.topology if mesh.topology.nodes > 1 else None
    joined = None if setup.policy is None else fsdp2(model, setup.policy, mesh=topology)
    return trained(model, mesh.rank, model.parameters(), lambda optimizer: optimizer.step()), joined


EVENTS: list[Event] = ["evaluate", *(["forward", "backward"] * MICRO_BATCHES + ["step"]) * STEPS]


@each_rank(2, 2, processes=True)
def test_it_equals_our_engine_and_its_bytes_a_closed_form(mesh: Mesh) -> None:
    """Losses with int8 weights and int4 gradients equal our engine's to the bit, where both cut units alike.

    They do so whether blocks stay gathered or not.  The ledger has the bytes of frames times gathers and reductions.
    """
    torch.manual_seed(5)
    model = Matrices()
    policy = preset("exact", weights=POLICY.weights, gradients=POLICY.gradients, memory=ROOMY)
    zero = shard(model, mesh=mesh, policy=policy, blocks=list(model.blocks))
    ours = trained(model, mesh.rank, zero.param_groups(), zero.step)
    exact, _ = in_fsdp2_trained(mesh, Setup(Policy(weights=parse("fp32"), gradients=(parse("fp32"),) * 2)))
    passes = STEPS * MICRO_BATCHES
    for kept in (False, True):
        losses, joined = in_fsdp2_trained(mesh, Setup(kept=kept))
        assert losses == ours
        assert losses != exact
        assert losses == pytest.approx(exact, rel=0.05)
        assert joined is not None
        # The evaluation leaves the kept groups gathered for the first forward pass.
        gathers = passes * (1 + DEPTH) if kept else 1 + DEPTH + passes * (1 + 2 * DEPTH) - 1
        reductions = passes * (1 + DEPTH)
        assert joined.ledger.by_purpose() == {
            ("weights", "inter"): Sent(gathers * GATHERED, gathers),
            ("weights", "intra"): Sent(gathers * 2 * GATHERED, gathers),
            ("gradients", "intra"): Sent(reductions * 2 * REDUCED, reductions),
            ("gradients", "inter"): Sent(reductions * REDUCED, reductions),
        }
        names = [unit.name for unit in joined.units] if kept else ["root"]
        assert joined.ledger.rows() == joined.predict(EVENTS, kept=names)
        head, *rows, total = str(joined.ledger).splitlines()
        assert head.split("  ")[0] == "sent by this rank"
        assert [row.split()[0] for row in rows] == ["weights", "gradients"]
        between = gathers * GATHERED + reductions * REDUCED
        assert total.split() == [
            "total",
            f"{between:,}",
            f"{2 * between:,}",
            f"{2 * (gathers + reductions):,}",
        ]


@each_rank(1, 2, processes=True)
def test_mixed_precision_equals_fsdp2s_own(mesh: Mesh) -> None:
    """With weights in bf16 and gradients in fp32, losses on two ranks equal FSDP2's own bit for bit."""
    types: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    own, _ = in_fsdp2_trained(mesh, Setup(None, **types))
    policy = Policy(gradients=(parse("fp32"),) * 2)
    for setup in (Setup(policy, **types), Setup(policy, ahead=True, **types)):
        losses, joined = in_fsdp2_trained(mesh, setup)
        assert losses == own
        assert joined is not None
        assert joined.ledger.rows() == joined.predict(EVENTS)


# Streams

SETUPS = {
    "plain": Setup(),
    "kept": Setup(kept=True),
    "ahead": Setup(ahead=True),
    "bf16": Setup(param_dtype=torch.bfloat16),
    "chunks": Setup(Policy(weights=POLICY.weights, gradients=POLICY.gradients, chunks=2)),
    "ring": Setup(Policy(gradients=(parse("int8:32"),) * 2, gather="flat", reduce="ring")),
    "sum": Setup(reduce_dtype=torch.float16),  # in which FSDP2 divides gradients by itself
}


@contextlib.contextmanager
def _streams(detected: bool) -> Iterator[pytest.MonkeyPatch]:
    """Context in which each rank has the streams of a GPU, if ``detected``."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        if detected:
            on_streams(patch)
            in_fsdp2(patch)
            stack.enter_context(Detector())
        yield patch


def _losses(mesh: Mesh, setup: Setup) -> list[list[float]]:
    found = []
    for detected in (False, True):
        with _streams(detected):
            found.append(in_fsdp2_trained(mesh, setup)[0])
    return found


@pytest.mark.parametrize("name", ["plain", "ahead", "sum", *long("kept", "bf16", "chunks", "ring")])
def test_streams_change_nothing_and_race_nowhere(name: str) -> None:
    """On FSDP2's streams losses have the same bits, and any two accesses to the same memory are in order."""
    for without, on in on_processes(Topology(2, 2), _losses, SETUPS[name]):
        assert on == without


@contextlib.contextmanager
def _elsewhere(self: Wire) -> Iterator[None]:
    """Run on a stream that nothing waits for."""
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        yield


# The setup in which a wait is removed, and the function that is replaced.
SABOTAGES: dict[str, tuple[str, Any, str, Any]] = {
    "stream": ("plain", Wire, "on_current_stream", _elsewhere),
    "join": ("ahead", Arrival, "join", lambda _: None),
}


def _race(mesh: Mesh, name: str) -> str:
    setup, *replaced = SABOTAGES[name]
    with _streams(True) as patch:
        patch.setattr(*replaced)
        try:
            in_fsdp2_trained(mesh, SETUPS[setup])
        except RaceError as race:
            return str(race)
    return "no race"


@pytest.mark.parametrize("name", SABOTAGES)
def test_a_missing_wait_is_a_race(name: str) -> None:
    """Work on a stream that FSDP2 does not know, and a gather ahead that nothing waits for, are races."""
    assert all("is in no order with" in race for race in on_processes(Topology(1, 2), _race, name))


# Refusals


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("zeropp", "secondary = node inside fsdp2: FSDP2 gathers anew in backward"),
        ("sdp4bit", "inside fsdp2"),
        (preset("qwz", planes=2), "planes = 2 inside fsdp2"),
        (preset("qwz+qgz", compute="bf16"), "compute = bf16 inside fsdp2: .*MixedPrecisionPolicy"),
        (preset("qwz+qgz", offload=Offload(optimizer=1.0)), "offload.optimizer = 1.0 inside fsdp2"),
        (preset("zero2"), "stage = 2 inside fsdp2"),
        (
            preset("qwz", budget=BitBudget(codecs=(parse("int4:256"),), weights=6.0)),
            "budget = .* inside fsdp2",
        ),
        ("zero++", r"unknown policy 'zero\+\+'"),
    ],
)
def test_a_policy_that_fsdp2_cannot_carry_out_is_refused(policy: Policy | str, message: str) -> None:
    """One line names the field, before anything is sent."""
    with pytest.raises(PolicyError, match=rf"\A[^\n]*{message}[^\n]*\Z"):
        fsdp2(nn.Linear(2, 2), policy)


def test_a_model_that_is_not_sharded_is_refused() -> None:
    """The error says which call is missing."""
    with pytest.raises(
        HostError, match=r"\ALinear is not sharded: call fully_shard\(\) on it and its blocks"
    ):
        fsdp2(nn.Linear(2, 2))


@each_rank(1, 2, processes=True)
def test_a_topology_of_other_ranks_is_refused(mesh: Mesh) -> None:
    """The error has both numbers of ranks."""
    model = sharded(mesh.topology.world, Setup())
    with pytest.raises(MeshError, match="needs 4 ranks, but the process group has 2"):
        fsdp2(model, mesh=Topology(2, 2))


@each_rank(1, 2, processes=True)
def test_a_second_call_with_one_model_is_refused(mesh: Mesh) -> None:
    """It would leave the first call's ledger empty without a word."""
    model = sharded(mesh.topology.world, Setup())
    first = fsdp2(model, POLICY)
    with pytest.raises(
        HostError, match=r"\Afsdp2\(\) was called before with this FSDPMatrices, and the ledger [^\n]*\Z"
    ):
        fsdp2(model, POLICY)
    model(batch(0, mesh.rank)).backward()
    assert first.ledger.rows()
