"""Interleaved rounds: contenders take turns on the same ranks, so that drift hits all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from timeit import timeit
from typing import Final, TypeVar

import torch
import torch.distributed as dist

from harness.cluster.rank import Progress, Rank

COLLECTING: Final = "gc.enable()"  # what timeit() calls first: it would switch garbage collection off
T = TypeVar("T")
Drawn = TypeVar("Drawn")


def interleaved(
    rank: Rank,
    contenders: Sequence[Callable[[Drawn], T]],
    stage: str,
    rounds: tuple[int, int],
    prepare: Callable[[int], Drawn],
    *,
    seconds: float = 0.0,
) -> list[list[T]]:
    """Run each contender once per round, in rotating order, all ranks from a barrier; returns results by
    round.

    Contenders get what ``prepare`` made, untimed, of the round's number, where 0 is the warm-up, left out of
    the results; ``rounds`` are the fewest and the most, as fit ``seconds``.
    """
    found: list[list[T]] = [[] for _ in contenders]
    (fewest, most), begin, index = rounds, 0.0, 0
    while index <= most:
        rank.report(Progress("warm-up" if index == 0 else stage, max(index - 1, 0), most))
        prepared = prepare(index)
        if index == 1:
            begin = time.perf_counter()
        for place in range(len(contenders)):
            turn = (place + index) % len(contenders)
            dist.barrier()
            value = contenders[turn](prepared)
            if index > 0:
                found[turn].append(value)
        if index == 1:
            fitting = int(seconds / (time.perf_counter() - begin))
            agreed = torch.tensor(min(most, max(fewest, fitting)))
            dist.broadcast(agreed, src=0)
            most = int(agreed)
        index += 1
    return found


def timed(run: Callable[[], object]) -> Callable[[object], float]:
    """A contender that calls ``run`` and returns its seconds on this rank."""
    return lambda _: timeit(run, setup=COLLECTING, number=1)
