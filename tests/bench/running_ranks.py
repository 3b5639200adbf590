"""Ranks that stay alive between the rounds of a benchmark: processes joined by gloo, which a test commands."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from impl.comm.mesh import Mesh
from impl.policy.topology import Topology

Prepare = Callable[..., Callable[[], object]]
"""Called as ``prepare(mesh, *case)`` on each rank; returns what a round calls."""
_SECONDS = 120.0  # for which the test waits for a rank


class Ranks:
    """The processes of a topology.  :meth:`prepare` chooses what a round runs, and :meth:`round` runs it once."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes

    def prepare(self, prepare: Prepare, *case: Any) -> list[Any]:
        """Prepare a case on all ranks; returns the attribute ``facts`` of what a round calls, by rank, or None."""
        return self._all((prepare, case))

    def round(self) -> None:
        """Run the prepared case once on all ranks, and wait for the last of them."""
        self._all(None)

    def _all(self, message: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(message)
        answers = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(_SECONDS), f"rank {rank} gave no answer in {_SECONDS:g} s"
            answers.append(pipe.recv())
        if errors := [answer for answer in answers if isinstance(answer, Exception)]:
            raise errors[0]
        return answers


@contextmanager
def running(topology: Topology) -> Iterator[Ranks]:
    """Start the ranks of a topology, and end them after the body."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        pipes = []
        for rank in range(topology.world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, topology, Path(folder, "store"), theirs), daemon=True
            )
            process.start()
            theirs.close()
            stack.callback(process.join)
            stack.callback(ours.close)  # which ends the process
            pipes.append(ours)
        yield Ranks(pipes)


def _serve(rank: int, topology: Topology, store: Path, pipe: Connection) -> None:
    """Prepare and run what the test asks for, until it closes the pipe."""
    torch.set_num_threads(1)
    shared = dist.FileStore(str(store), topology.world)
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=topology.world)
    mesh, run = Mesh.create(topology), None
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            dist.destroy_process_group()
            return
        answer: Any = None
        try:
            if message is None:
                assert run is not None
                run()
            else:
                prepare, case = message
                run = prepare(mesh, *case)
                answer = getattr(run, "facts", None)
        except Exception as error:
            answer = RuntimeError(f"rank {rank}: {type(error).__name__}: {error}")
        pipe.send(answer)
