"""Tests that flags in shared memory announce rows in order, with the C++ library or plainly on x86."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import pytest
import torch

from impl.comm.mesh import Mesh
from impl.comm.watchdog import WireError
from impl.comm.wire import Wire
from impl.cpu import build
from impl.plan.traffic import Tag
from impl.transport import shared_memory
from impl.transport.shared_memory import SharedMemoryError, flag_functions
from tests.support.ranks import each_rank


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Forget choices that were made under a test's patches."""
    flag_functions.cache_clear()
    yield
    flag_functions.cache_clear()


def _no_library(_: object) -> None:
    raise build.BuildError("no C++ compiler installed: looked for c++")


@pytest.mark.parametrize("machine", ["aarch64", "riscv64", "ppc64le"])
def test_a_processor_that_reorders_writes_needs_the_library(
    monkeypatch: pytest.MonkeyPatch, machine: str
) -> None:
    """Without the library the transport is refused in one line, which names the way out."""
    monkeypatch.setattr(build, "library", _no_library)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with pytest.raises(SharedMemoryError) as refusal:
        flag_functions()
    assert str(refusal.value) == (
        f"transport 'shm' on {machine}, which reorders writes, needs the C++ kernels (no C++ compiler installed: "
        "looked for c++): install what their build lacks, or use transport 'backend' (in a suite, "
        "cluster.transport = 'gloo')"
    )


def test_x86_keeps_the_order_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """On x86, plain writes and reads are used if the library is missing."""
    monkeypatch.setattr(build, "library", _no_library)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert flag_functions() is None


@pytest.mark.needs("c++")
def test_flags_use_the_library_where_it_is_built() -> None:
    """The library is used on x86 too, so that tests there cover it."""
    assert flag_functions() is not None


@pytest.mark.parametrize("functions", ["library", "plain"])
@each_rank(1, 2, processes=True)
def test_rows_are_whole_when_their_flags_are_seen(mesh: Mesh, functions: str) -> None:
    """Over thousands of exchanges between two processes no byte of a row is older than its flag."""
    with pytest.MonkeyPatch.context() as patch:
        if functions == "plain":
            if platform.machine() not in shared_memory._KEEPS_ORDER:
                return
            patch.setattr(build, "library", _no_library)
        wire, axis = Wire(mesh, transport="shm"), mesh.topology.local_axis
        for number in range(3000):
            exchange = wire.all_gather(axis, 1024, Tag("forward", "weights", "u"))
            exchange.send.fill_((number + mesh.rank) % 251)
            exchange.post()
            rows = exchange.wait()
            assert [int(row.min()) for row in rows] == [(number + rank) % 251 for rank in range(2)]
            assert [int(row.max()) for row in rows] == [(number + rank) % 251 for rank in range(2)]
            exchange.close()


@each_rank(1, 2, processes=True)
def test_a_wire_without_ordered_flags_is_refused(mesh: Mesh) -> None:
    """All ranks raise the error at their first exchange, before any waits for another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "library", _no_library)
        patch.setattr(platform, "machine", lambda: "aarch64")
        wire = Wire(mesh, transport="shm", timeout=20)
        with pytest.raises((SharedMemoryError, WireError), match="transport 'shm' on aarch64"):
            wire.all_gather(mesh.topology.local_axis, 64, Tag("forward", "weights", "u"))
    assert torch.equal(Wire(mesh).all_gather_small(torch.tensor([mesh.rank])), torch.tensor([[0], [1]]))
