"""Ranks for tests: threads of one process for speed, processes where it matters.

Thread ranks use torch's internal ``multi_threaded_pg``, the only use of internals in the project;
they run 4 ranks in well under a second and have no send and receive.
"""

from __future__ import annotations

import functools
import inspect
import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg

from harness.cluster.rank_processes import start_server
from impl.comm.mesh import Mesh
from impl.plan.topology import Topology
from tests.support import nccl_rules


def on_threads(
    topology: Topology, body: Callable[..., Any], *args: Any, backend: str = "threaded", seconds: float = 120
) -> list[Any]:
    """Run ``body(mesh, *args)`` on every rank, as threads; returns the results in rank order.

    Backend ``nccl_rules`` is :mod:`tests.support.nccl_rules`, in which a call waits ``seconds`` for others.
    """
    nccl_rules.register()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # groups of one thread are not another's
    excepthook = sys.excepthook  # init_process_group puts the rank before every traceback line
    if not hasattr(multi_threaded_pg.ThreadLocalWorld, "comms"):  # torch 2.11 forgot it, and asks for it
        multi_threaded_pg.ThreadLocalWorld.comms = property(lambda _: [])
    multi_threaded_pg._install_threaded_pg()
    store = dist.HashStore()
    results: list[Any] = [None] * topology.world
    errors: list[BaseException | None] = [None] * topology.world

    def rank_main(rank: int) -> None:
        try:
            dist.init_process_group(
                backend, rank=rank, world_size=topology.world, store=store, timeout=timedelta(seconds=seconds)
            )
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = body(Mesh.create(topology), *args)
        except BaseException as error:
            errors[rank] = error
            multi_threaded_pg.ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    try:
        threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(topology.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            if thread.is_alive():
                raise TimeoutError("a thread rank did not finish within 120 s")
    finally:
        multi_threaded_pg._uninstall_threaded_pg()
        multi_threaded_pg.ProcessLocalGroup.reset()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        sys.excepthook = excepthook
    real = [
        error for error in errors if error is not None and not isinstance(error, threading.BrokenBarrierError)
    ]
    if real:
        raise real[0]
    return results


def each_rank(
    nodes: int = 0, ranks: int = 0, *, processes: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs a test, whose first parameter is the rank's mesh, on every rank: threads, unless processes.

    Without numbers the ranks are those of the test's parameter ``topology``.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def run(**given: Any) -> None:
            topology = Topology(nodes, ranks) if nodes else given["topology"]
            if processes:  # in which the name of the test is this function
                on_processes(topology, _unwrapped, run, given)
            else:
                on_threads(topology, functools.partial(test, **given))

        functools.update_wrapper(run, test)
        parameters = list(inspect.signature(test).parameters.values())[1:]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what pytest gives
        return run

    return decorate


def _unwrapped(mesh: Mesh, test: Any, given: dict[str, Any]) -> None:
    test.__wrapped__(mesh, **given)


def on_processes(topology: Topology, body: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``body(mesh, *args)``, which must be importable, on every rank, as processes joined by gloo."""
    start_server()  # the one of trials, whichever test comes first: a process has one
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        queue = context.Queue()
        ranks = [
            context.Process(
                target=_process_rank, args=(topology, rank, folder, queue, body, args), daemon=True
            )
            for rank in range(topology.world)
        ]
        for rank in ranks:
            rank.start()
        results: dict[int, Any] = {}
        try:
            for _ in ranks:
                rank, value, error = queue.get(timeout=180)
                if error is not None:
                    raise AssertionError(f"rank {rank}:\n{error}")
                results[rank] = pickle.loads(value)  # noqa: S301  # our own child's
        finally:
            for process in ranks:
                process.join(10)
                if process.is_alive():
                    process.kill()
    return [results[rank] for rank in range(topology.world)]


def _process_rank(  # noqa: PLR0917  # multiprocessing passes by position
    topology: Topology, rank: int, folder: str, queue: Any, body: Any, args: Any
) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # this process is an entry point
    try:
        store = dist.FileStore(os.path.join(folder, "store"), topology.world)  # noqa: PTH118
        dist.init_process_group("gloo", rank=rank, world_size=topology.world, store=store)
        value = body(Mesh.create(topology), *args)
        dist.barrier()
        dist.destroy_process_group()
        queue.put((rank, pickle.dumps(value), None))  # by value, not through torch's shared memory
    except BaseException:
        queue.put((rank, None, traceback.format_exc()))
