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
    """Run each candidate once in every round, in an order that rotates from round to round.

    All ranks must call this function.  A barrier precedes each run.  The first round warms up, and its results are
    dropped.

    Args:
        rank: This rank, through which progress is reported.
        candidates: Functions to run.
        stage: Words for the progress line.
        rounds: (fewest rounds, most rounds).  Between these limits, there are as many rounds as fit into ``seconds``.
            Rank 0 estimates this number from the duration of its first round after the warm-up.
        seconds: About how long all rounds together may take.

    Returns:
        For each candidate, the list of the values that it returned, one for each round.
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
    """Return a function that calls ``run`` once, and returns the seconds that this call took."""
    return partial(timeit, run, setup=COLLECTING, number=1)
