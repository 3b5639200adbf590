"""Times candidates in interleaved rounds, so that slow drift of the machine affects all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from timeit import timeit
from typing import Final, TypeVar

import torch
import torch.distributed as dist

from harness.cluster.rank import Progress, Rank

COLLECTING: Final = "gc.enable()"  # set-up for timeit(), which otherwise disables garbage collection
T = TypeVar("T")


def interleaved(
    rank: Rank,
    candidates: Sequence[Callable[[], T]],
    stage: str,
    rounds: tuple[int, int],
    *,
    seconds: float = 0.0,
) -> list[list[T]]:
    """Run each candidate once in every round, in rotating order; all ranks must call this.

    A barrier precedes each run.  The first round warms up; its results are dropped.

    Args:
        rank: Reports progress.
        candidates: Functions to run.
        stage: What the progress line says.
        rounds: Fewest and most rounds.  The time of the first round after the warm-up decides how many fit ``seconds``.
        seconds: About how long all rounds may take.

    Returns:
        The values that each candidate returned, by candidate and round.
    """
    results: list[list[T]] = [[] for _ in candidates]
    (fewest, most), begin, index = rounds, 0.0, 0
    while index <= most:
        rank.report(Progress(f"{stage}, round {index} of {most}" if index else "warm-up"))
        if index == 1:
            begin = time.perf_counter()
        for place in range(len(candidates)):
            turn = (place + index) % len(candidates)
            dist.barrier()
            returned = candidates[turn]()
            if index > 0:
                results[turn].append(returned)
        if index == 1:
            agreed = torch.tensor(min(most, max(fewest, int(seconds / (time.perf_counter() - begin)))))
            dist.broadcast(agreed, src=0)
            most = int(agreed)
        index += 1
    return results


def timed(run: Callable[[], object]) -> Callable[[], float]:
    """Return a candidate that calls ``run`` and returns the seconds that the call took on this rank."""
    return partial(timeit, run, setup=COLLECTING, number=1)
