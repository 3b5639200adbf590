"""Interleaved rounds: candidates take turns on the same ranks, so that drift hits all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from timeit import timeit
from typing import Final, TypeVar

import torch
import torch.distributed as dist

from harness.cluster.rank import Progress, Rank

COLLECTING: Final = "gc.enable()"  # timeit()'s set-up, since it switches garbage collection off
T = TypeVar("T")


def interleaved(
    rank: Rank,
    candidates: Sequence[Callable[[], T]],
    stage: str,
    rounds: tuple[int, int],
    *,
    seconds: float = 0.0,
) -> list[list[T]]:
    """Run each candidate once per round, in rotating order, all ranks from a barrier; return the results by
    candidate and round, without a warm-up.  Of ``rounds``, fewest and most, as many run as fit ``seconds``.
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
    """A candidate that calls ``run`` and returns its seconds on this rank."""
    return partial(timeit, run, setup=COLLECTING, number=1)
