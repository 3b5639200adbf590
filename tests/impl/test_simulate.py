"""Tests that ranks as threads of one process compute what rank processes compute, and end together."""

from __future__ import annotations

import _thread
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from impl.comm.mesh import Mesh, MeshError
from impl.comm.watchdog import WireError
from impl.comm.wire import Wire
from impl.plan.traffic import Tag
from impl.policy.presets import preset
from impl.policy.topology import Topology
from impl.simulate import simulate
from impl.transport.threads import ThreadRankError, current
from impl.zero import shard
from tests.golden import record
from tests.support.params import long
from tests.support.ranks import on_processes
from tests.support.strategies import ROOMY
from tests.support.training import Training, model

TAG = Tag("forward", "weights", "u")
TOPOLOGIES = (Topology(2, 2), Topology(4, 2), Topology(3, 2))
POLICIES = ("zero3", "zeropp", "sdp4bit", "loco", "classic on all hops", "reduced once a step")
SECONDS = 60.0  # within which tests expect ranks to end


def _everything(mesh: Mesh, names: tuple[str, ...]) -> dict[str, Any]:
    """Losses, masters and ledger of one rank, by policy, after 3 steps of 2 micro-batches."""
    torch.set_num_threads(1)
    found = {}
    for name in names:
        run = Training(mesh, model(), record.policies()[name])
        losses = [run.step(number, 2).hex() for number in range(3)]
        masters = [unit.master_shard.master.detach().clone() for unit in run.zero.units]
        ledger = sorted([*key, *sent] for key, sent in run.zero.wire.ledger.rows().items())
        found[name] = losses, [master.view(torch.int32).tolist() for master in masters], ledger
    return found


@pytest.mark.parametrize("topology", [TOPOLOGIES[0], *long(*TOPOLOGIES[1:])], ids=str)
def test_losses_masters_and_ledgers_are_those_of_processes(topology: Topology) -> None:
    """Thread ranks and rank processes have the same losses, masters and ledger rows on every rank, to the bit."""
    threads = simulate(topology.nodes, topology.ranks_per_node)(_everything, POLICIES)
    for rank, processes in enumerate(on_processes(topology, _everything, POLICIES)):
        for name in POLICIES:
            assert threads[rank][name] == processes[name], (rank, name)


def _noisy() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16), nn.Dropout(0.1))


def _with_dropout(mesh: Mesh) -> list[Any]:
    """Losses of a model with dropout, and what the generator gives afterwards; each rank has its own seed."""
    torch.set_num_threads(1)
    torch.manual_seed(5)
    zero = shard(net := _noisy(), mesh=mesh, policy=preset("zeropp", memory=ROOMY))
    optimizer = torch.optim.AdamW(zero.param_groups(), lr=1e-2)
    torch.manual_seed(100 + mesh.rank)
    losses = []
    for _ in range(3):
        loss = net(torch.randn(4, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return [losses, torch.rand(4).tolist()]


def test_dropout_and_seeds_are_those_of_processes() -> None:
    """Random numbers of a rank depend on its own seed alone, and the caller's generator is left as it was."""
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    threads = simulate(2, 2)(_with_dropout)
    assert torch.equal(torch.rand(2), expected)
    assert threads == on_processes(Topology(2, 2), _with_dropout)
    assert len({str(losses) for losses, _ in threads}) == 4


def test_results_are_in_rank_order_and_arguments_arrive() -> None:
    """Each rank gets its mesh and the arguments; results are in rank order, and a rank knows itself."""

    def body(mesh: Mesh, word: str) -> tuple[str, int, str]:
        rank = current()
        assert rank is not None
        return word, rank.rank, f"{mesh.topology} {mesh.device}"

    assert simulate(2, 3)(body, "w") == [("w", rank, "2x3 cpu") for rank in range(6)]
    assert current() is None


def _exchange(wire: Wire, unit: str = "u") -> Tensor:
    exchange = wire.all_gather(wire.mesh.topology.world_axis, 8, TAG._replace(unit=unit))
    exchange.send.fill_(wire.mesh.rank)
    exchange.post()
    rows = exchange.wait().clone()
    exchange.close()
    return rows


def _alive() -> int:
    """Count the threads that are ranks, once those that end have had the time to."""
    deadline = time.monotonic() + 10
    while (count := sum(each.name.startswith("rank ") for each in threading.enumerate())) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.01)
    return count


def test_an_error_of_one_rank_ends_all() -> None:
    """The caller gets that rank's error, with a note that names the rank; no other rank goes on."""
    went_on = []

    def body(mesh: Mesh) -> None:
        wire = Wire(mesh)
        _exchange(wire)
        if mesh.rank == 2:
            raise ZeroDivisionError("mine")
        try:
            _exchange(wire)
        except Exception:  # a rank that is to end does not take part in error handling
            went_on.append(mesh.rank)
        went_on.append(mesh.rank)

    begin = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        simulate(2, 2)(body)
    assert caught.value.__notes__ == ["raised on rank 2 of 4 ranks that are threads"]
    assert not went_on
    assert time.monotonic() - begin < SECONDS
    assert not _alive()


def _never_posts(mesh: Mesh) -> None:
    wire = Wire(mesh)
    _exchange(wire)
    if mesh.rank != 1:
        _exchange(wire, "late")


def _parts(mesh: Mesh) -> None:
    _exchange(Wire(mesh), "b" if mesh.rank == 1 else "a")


def _skips_a_call(mesh: Mesh) -> None:
    zero = shard(model(), mesh=mesh, policy=preset("exact", memory=ROOMY))
    if mesh.rank != 1:
        zero.grad_norm()


def _alone_in_store(mesh: Mesh) -> None:
    if mesh.rank != 1:
        Wire(mesh).meet("lunch")


def _alone_outside(mesh: Mesh) -> None:
    if mesh.rank != 1 and mesh.thread is not None:
        mesh.thread.share(mesh.rank)


@pytest.mark.parametrize(
    ("body", "kind", "texts"),
    [
        (
            _never_posts,
            WireError,
            [
                "could not finish exchange 2, all_gather of 8 B along world (3 ranks) for forward weights late",
                "no rank can go on: rank 1 did not send",
                "ranks 0 and 2: gave up waiting for exchange 2",
                "rank 1: did not report",
            ],
        ),
        (
            _parts,
            WireError,
            ["found that the ranks' exchanges differ", "ranks 0 and 2 opened", "rank 1 opened"],
        ),
        (_skips_a_call, WireError, ["all ranks must call grad_norm(): ranks 0 and 2 did, rank 1 did not"]),
        (
            _alone_in_store,
            WireError,
            [
                "could not finish lunch: waits for rank 1, and no rank can go on",
                "rank 1: did not report: it has ended, or waits for something else",
            ],
        ),
        (
            _alone_outside,
            ThreadRankError,
            ["waits for rank 1 in a call that all ranks must make, and no rank can go on"],
        ),
    ],
)
def test_a_rank_that_never_comes_is_found_at_once(
    body: Callable[[Mesh], None], kind: type[Exception], texts: list[str]
) -> None:
    """If no rank can go on, the error tells what each rank waits for, long before any time-out."""
    begin = time.monotonic()
    with pytest.raises(kind) as caught:
        simulate(1, 3, timeout=10 * SECONDS)(body)
    for text in texts:
        assert text in str(caught.value)
    assert time.monotonic() - begin < SECONDS
    assert not _alive()


def test_a_rank_that_keeps_its_turn_is_named_with_its_stack() -> None:
    """A rank that waits for something else than messages ends all ranks after the time-out."""
    released = threading.Event()

    def waits_for_something_else(mesh: Mesh) -> None:
        if mesh.rank == 1:
            released.wait(SECONDS)
        _exchange(Wire(mesh))

    try:
        with pytest.raises(ThreadRankError, match=r"rank 1 has run for .* in wait .*threading\.py.*timeout="):
            simulate(1, 2, timeout=0.5)(waits_for_something_else)
    finally:
        released.set()
    assert not _alive()


def test_ctrl_c_ends_all_ranks() -> None:
    """After Ctrl-C the caller gets a KeyboardInterrupt, and no rank goes on."""
    begun = threading.Event()

    def exchanges_for_ever(mesh: Mesh) -> None:
        wire = Wire(mesh)
        while True:
            _exchange(wire)
            begun.set()

    def interrupts() -> None:
        begun.wait(SECONDS)
        _thread.interrupt_main()

    threading.Thread(target=interrupts, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        simulate(2, 2)(exchanges_for_ever)
    assert not _alive()


def test_what_thread_ranks_cannot_do_is_refused_in_one_line() -> None:
    """Other transports, pacers, process groups, other devices, and ranks inside of ranks are refused."""

    def refused(mesh: Mesh) -> list[str]:
        return [
            _said(lambda: Wire(mesh, transport="shm")),
            _said(lambda: Wire(mesh, transport="staged")),
            _said(lambda: Wire(mesh, pacer=object())),  # type: ignore[arg-type]
            _said(lambda: mesh.group(mesh.topology.world_axis).process_group),
            _said(Mesh.create),
            _said(lambda: simulate(1, 1)(lambda _: None)),
        ]

    shm, staged, pacer, group, mesh, nested = simulate(1, 2)(refused)[0]
    assert (
        shm
        == "transport 'shm' joins processes, but the ranks are threads of one process: leave transport= out"
    )
    assert staged.startswith("transport 'staged' joins processes")
    assert "leave pacer= out" in pacer
    assert "ranks that are threads have no process groups" in group
    assert mesh == "ranks that are threads have a mesh already: use the one that simulate() passes"
    assert nested == (
        "simulate() was called inside simulate(), by its rank 0: call it outside of the function that the ranks run"
    )
    with pytest.raises(
        ThreadRankError, match="device='meta': ranks of one process compute on the CPU or on one"
    ):
        simulate(1, 2, device="meta")
    with pytest.raises(ValueError, match="at least 1 node"):
        simulate(0, 2)


def _said(call: Callable[[], object]) -> str:
    with pytest.raises((WireError, MeshError, ThreadRankError)) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def _trained_on(mesh: Mesh) -> list[float]:
    torch.manual_seed(5)
    with mesh.device:
        net = _noisy()
    zero = shard(net, mesh=mesh, policy=preset("zeropp", memory=ROOMY))
    optimizer = torch.optim.AdamW(zero.param_groups(), lr=1e-2)
    torch.manual_seed(100 + mesh.rank)
    losses = []
    for _ in range(3):
        loss = net(torch.randn(4, 16, device=mesh.device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.gpu
def test_ranks_share_one_gpu() -> None:
    """On one GPU ranks train alike twice, also on streams of their own, which wait for each other's messages."""

    def on_own_stream(mesh: Mesh) -> list[float]:
        stream = torch.cuda.Stream(mesh.device)
        stream.wait_stream(torch.cuda.default_stream(mesh.device))
        with torch.cuda.stream(stream):
            return _trained_on(mesh)

    first = simulate(2, 2, device="cuda")(_trained_on)
    assert len({str(losses) for losses in first}) == 4
    assert simulate(2, 2, device="cuda")(_trained_on) == first
    assert simulate(2, 2, device="cuda")(on_own_stream) == first


def test_the_guide_s_script_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The script of zero.md trains 128 ranks in this process, and its loss falls below that of no training."""
    text = (Path(__file__).parents[2] / "docs" / "guide" / "zero.md").read_text(encoding="utf-8")
    (script,) = (each for each in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "simulate(" in each)
    exec(compile(script, "zero.md", "exec"), {})  # noqa: S102  # our own text
    found = re.fullmatch(r"loss (\d\.\d+), (\d+) bytes between nodes\n", capsys.readouterr().out)
    assert found
    assert float(found[1]) < 1.0
    assert int(found[2]) > 0
