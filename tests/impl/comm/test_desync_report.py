"""Tests of the error of a rank that waits in vain: it tells what every rank was doing."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from impl.comm import watchdog
from impl.comm.mesh import Mesh
from impl.comm.watchdog import Watchdog, WireError
from impl.comm.wire import Wire
from impl.plan.traffic import Tag
from impl.policy.topology import Topology
from tests.impl.comm.test_wire import arrive
from tests.support.params import nightly

GATHER = "all_gather of 64 B along world"


def _rank(rank: int, world: int, folder: str, body: Callable[[Mesh, Any], str], argument: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # this process is an entry point
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", rank=rank, world_size=world, store=store)
    text = body(Mesh.create(Topology(1, world)), argument)
    Path(folder, f"{rank}.txt").write_text(text, encoding="utf-8")
    time.sleep(20 if rank == 0 else 0)  # until the others have ended: gloo tells them at once if it goes


def _survivors(folder: Path, world: int, body: Callable[[Mesh, Any], str], argument: Any) -> dict[int, str]:
    """Return the ranks' texts; ranks that died, sleep or were stopped have none, and are killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "impl.zero"])
    ranks = [
        context.Process(target=_rank, args=(rank, world, str(folder), body, argument), daemon=True)
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    texts: dict[int, str] = {}
    try:
        deadline = time.monotonic() + 120
        while 0 not in texts and time.monotonic() < deadline:
            time.sleep(0.1)
            texts = {int(path.stem): path.read_text(encoding="utf-8") for path in folder.glob("*.txt")}
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return texts


def _exchange(wire: Wire, unit: str) -> None:
    exchange = wire.all_gather(wire.mesh.topology.world_axis, 64, Tag("forward", "weights", unit))
    exchange.send.zero_()
    arrive(exchange)


def _fails(wire: Wire, unit: str) -> str:
    try:
        _exchange(wire, unit)
    except WireError as error:
        return str(error)
    return "arrived"


def _scattered(mesh: Mesh, transport: str) -> str:
    """Rank 0 waits; rank 1 is in its own code, rank 2 dies, rank 3 closes its wire, rank 4 is stopped."""
    wire = Wire(mesh, transport=transport, timeout=4)
    _exchange(wire, "a")
    if mesh.rank == 1:
        time.sleep(60)
    if mesh.rank == 2:
        os._exit(3)
    if mesh.rank == 3:
        wire.close()
        time.sleep(60)
    if mesh.rank == 4:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1)  # until all are there
    return _fails(wire, "b")


def _said_of(ranks: str, text: str) -> str:
    """Return the part of a report about these ranks."""
    parts = text.split(f"\n{ranks}: ")
    assert len(parts) == 2, text
    return parts[1].split("\nrank")[0]


@pytest.mark.long
@pytest.mark.parametrize("transport", ["shm", *nightly("backend")])
def test_what_each_rank_does_is_told_apart(transport: str, tmp_path: Path) -> None:
    """The report distinguishes ranks that wait, ranks that closed their wire, and ranks that do not report."""
    text = _survivors(tmp_path, 5, _scattered, transport)[0]
    first = text.splitlines()[0]
    assert first.startswith(f"rank 0 could not finish exchange 2, {GATHER} (5 ranks) for forward weights b: ")
    assert transport != "shm" or first.endswith("waited 4 s: ranks 1, 2, 3 and 4 did not send")
    given_up = f"gave up waiting for exchange 2, {GATHER} (5 ranks) for forward weights b"
    assert _said_of("rank 0", text) == given_up
    assert _said_of("rank 3", text) == "closed its wire after 1 exchanges"
    assert _said_of("ranks 1, 2 and 4", text) == "did not report within 5 s: computing, exited, or lost"


def _late(mesh: Mesh, _: None) -> str:
    watchdog._PATIENCE_SECONDS = 1.0  # type: ignore[misc]  # this process is an entry point
    wire = Wire(mesh, timeout=2)
    _exchange(wire, "a")
    if mesh.rank == 1:
        time.sleep(5)
    text = _fails(wire, "b")
    if mesh.rank == 0:  # whose result ends the test
        time.sleep(5)
    return text


@pytest.mark.long
def test_a_rank_that_comes_late_learns_who_gave_up(tmp_path: Path) -> None:
    """Gloo closes a connection that timed out; the error of the late rank says that its peer gave up, and where."""
    texts = _survivors(tmp_path, 2, _late, None)
    assert "Timed out waiting 2000ms" in texts[0].splitlines()[0]
    assert "computing, exited, or lost" in _said_of("rank 1", texts[0])
    assert _said_of("ranks 0 and 1", texts[1]).startswith(
        f"gave up waiting for exchange 2, {GATHER} (2 ranks)"
    )


def test_what_ranks_say_survives_the_store_and_is_told_of_those_alike_together() -> None:
    """A rank's status and exchanges arrive unchanged, and ranks with the same status share a line."""
    store = dist.HashStore()
    meshes: Any = [
        SimpleNamespace(rank=i, topology=Topology(1, 3), store=lambda: store, counting="") for i in range(3)
    ]
    dogs = [Watchdog(mesh) for mesh in meshes]
    for rank, dog in enumerate(dogs):
        for n in (1, 2, 1):
            fields = ("shift", "node", 2, 1, 8 * n, "step", "state", "u" if rank else "v", n == 2)
            step = dog.collective_log.open(fields)
    dogs[1].close()
    dogs[2].close()
    shift = "shift of 8 B along node (2 ranks) for step state"
    assert str(dogs[0].error("could not go on", "nobody came\nhere", step)).splitlines() == [
        "rank 0 could not go on: nobody came",
        f"the ranks' exchanges first differ at exchange 1: rank 0 started {shift} v; ranks 1 and 2 started {shift} u",
        f"rank 0: gave up waiting for exchange 3, {shift} u",
        "ranks 1 and 2: closed its wire after 3 exchanges",
    ]
    gone: Any = Mock(set=Mock(side_effect=RuntimeError("closed")))
    dogs[1]._store = gone
    assert str(dogs[1].error("could not go on", "why")).splitlines() == [
        "rank 1 could not go on: why",
        "the other ranks' reports are missing, because their store is lost (closed)",
    ]
