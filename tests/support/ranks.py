"""Ranks for tests: threads of one process for speed, processes where it matters.

Thread ranks are those of :mod:`impl.simulate`.  Where torch.distributed itself is tested, they are torch's own thread
ranks (its internal ``multi_threaded_pg``, the only use of internals in the tests), with backend ``threaded``, which has
no send and receive, or ``nccl_rules`` (:mod:`tests.support.nccl_rules`).
"""

from __future__ import annotations

import functools
import inspect
import pickle
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg

from harness.cluster.port import Port
from harness.cluster.rank import Rank
from harness.cluster.rank_processes import Launch, LaunchError, run_ranks
from impl.comm.mesh import Mesh
from impl.policy.topology import Topology
from impl.simulate import simulate
from tests.support import nccl_rules


def on_threads(
    topology: Topology, body: Callable[..., Any], *args: Any, backend: str = "threads", seconds: float = 120
) -> list[Any]:
    """Run ``body(mesh, *args)`` on every rank, as threads; returns the results in rank order.

    ``seconds`` is how long a rank may run without a message or, with torch's backends, wait for one.
    """
    if backend == "threads":
        return simulate(topology.nodes, topology.ranks_per_node, timeout=seconds)(body, *args)
    return _on_torch_threads(topology, body, args, backend, seconds)


def _on_torch_threads(
    topology: Topology, body: Callable[..., Any], args: Sequence[Any], backend: str, seconds: float
) -> list[Any]:
    nccl_rules.register()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # each thread has its own groups
    excepthook = sys.excepthook  # init_process_group puts the rank before every traceback line
    if not hasattr(multi_threaded_pg.ThreadLocalWorld, "comms"):  # torch 2.11 forgot it, and asks for it
        multi_threaded_pg.ThreadLocalWorld.comms = property(lambda _: [])
    multi_threaded_pg._install_threaded_pg()
    store = dist.HashStore()

    def rank_main(rank: int) -> Any:
        try:
            dist.init_process_group(
                backend, rank=rank, world_size=topology.world, store=store, timeout=timedelta(seconds=seconds)
            )
            with torch.autograd.set_multithreading_enabled(False):
                return body(Mesh.create(topology), *args)
        except BaseException as error:
            multi_threaded_pg.ProcessLocalGroup.exception_handle(error)
            raise
        finally:
            dist.destroy_process_group()

    threads = ThreadPoolExecutor(topology.world)
    try:
        ranks = [threads.submit(rank_main, rank) for rank in range(topology.world)]
        errors = [rank.exception(timeout=120) for rank in ranks]
    finally:
        threads.shutdown(wait=False)
        multi_threaded_pg._uninstall_threaded_pg()
        multi_threaded_pg.ProcessLocalGroup.reset()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        sys.excepthook = excepthook
    for error in errors:
        if error is not None and not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [rank.result() for rank in ranks]


def each_rank(
    nodes: int = 0, ranks: int = 0, *, processes: bool = False, backend: str = "threads"
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs a test, whose first parameter is the rank's mesh, on every rank: threads, unless processes.

    Without numbers the ranks are those of the test's parameter ``topology``.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def run(**arguments: Any) -> None:
            topology = Topology(nodes, ranks) if nodes else arguments["topology"]
            if processes:  # where the test's name is this function
                on_processes(topology, _unwrapped, run, arguments)
            else:
                on_threads(topology, functools.partial(test, **arguments), backend=backend)

        functools.update_wrapper(run, test)
        parameters = list(inspect.signature(test).parameters.values())[1:]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # pytest reads it
        return run

    return decorate


def _unwrapped(mesh: Mesh, test: Any, arguments: dict[str, Any]) -> None:
    test.__wrapped__(mesh, **arguments)


def on_processes(topology: Topology, body: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``body(mesh, *args)``, which must be importable, on every rank, as processes joined by gloo."""
    with tempfile.TemporaryDirectory() as folder:
        ports = (Port("lo", "127.0.0.1"),) * topology.nodes
        launch = Launch(topology, ports, None, threads=1, timeout_seconds=180, log=Path(folder, "log"))
        try:
            results = run_ranks(_in_process, (body, args), launch)
        except LaunchError as error:
            log = "" if error.log is None else error.log.read_text(errors="replace")
            raise AssertionError(f"{error}\n{log}") from error
    return [pickle.loads(value) for value in results]  # noqa: S301  # our own children's


def _in_process(rank: Rank, call: tuple[Callable[..., Any], tuple[Any, ...]]) -> bytes:
    """The pickled result of a body, which so does not go through torch's shared memory."""
    body, args = call
    value = pickle.dumps(body(Mesh.create(rank.topology), *args))
    dist.barrier()
    return value
