"""Desync report: where every rank stands, put together when a wait fails.

A rank whose wait fails writes to the process group's own store what it waited for, what it finished last and
which exchanges it opened; then it collects for some seconds what the others wrote.  A rank that wrote nothing
computes, has exited, as far as its machine can be looked at from here, or is lost.  Nothing of this happens
in a step.
"""

from __future__ import annotations

import contextlib
import json
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import psutil
from torch.distributed.distributed_c10d import Store

from impl.comm.fingerprint import CollectiveLog, Step, parting, told
from impl.plan.topology import ranks_in_words

_PATIENCE_SECONDS: Final = 5.0  # for what others write
_SHOWN: Final = 3  # exchanges of a rank


class Standing(NamedTuple):
    """Where a rank stands, by itself or as far as is known of it.

    Attributes:
        says: lines, of which the first tells what it does.
        steps: its last exchanges, oldest first.
        gone: ranks of its machine that have exited.
    """

    says: Sequence[str]
    steps: Sequence[Step] = ()
    gone: Sequence[int] = ()


class DesyncReporter:
    """Writes where this rank stands, and collects where the others do.

    Wires are told apart by their number on each rank, so all ranks must make theirs in one order.

    Args:
        store: shared by all ranks.
    """

    def __init__(self, store: Store, rank: int, world: int, collective_log: CollectiveLog) -> None:
        self._store, self._rank, self._collective_log = store, rank, collective_log
        self._others = set(range(world)) - {rank}
        self._mark = f"zeropp/{store.add(f'zeropp/wires/{rank}', 1)}"
        self._who: dict[int, tuple[str, int]] = {}  # machine and process of each rank, as far as known
        store.set(f"{self._mark}/who/{rank}", json.dumps((_machine(), psutil.Process().pid)))

    def exited(self, ranks: Iterable[int]) -> list[int]:
        """Those of ``ranks`` that ran on this machine and no longer do, as far as the store says."""
        found = []
        for rank in ranks:
            with contextlib.suppress(RuntimeError):  # the store's
                if rank not in self._who and self._store.check([f"{self._mark}/who/{rank}"]):
                    machine, process = json.loads(self._store.get(f"{self._mark}/who/{rank}"))
                    self._who[rank] = machine, process
            machine, process = self._who.get(rank, ("", 0))
            if machine == _machine() and not _runs(process):
                found.append(rank)
        return found

    def write(self, does: str) -> None:
        """Tell the others what this rank does, and which exchanges it opened.

        Raises:
            RuntimeError: where the store cannot be reached.
        """
        log = self._collective_log
        steps = log.steps()
        says = [does, *(f"    opened {told(step)}" for step in steps[-_SHOWN:])]
        if log.finished is not None:
            says.append(f"    finished last: {told(log.finished)}")
        standing = Standing(says, steps, self.exited(self._others))
        self._store.set(f"{self._mark}/stands/{self._rank}", json.dumps(standing))

    def collect(self) -> dict[int, Standing]:
        """Where every rank stands, by rank.

        Takes up to 5 s; ends at once when all have written or exited.

        Raises:
            RuntimeError: where the store cannot be reached.
        """
        found: dict[int, Standing] = {}
        missing = {self._rank, *self._others}
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while missing and time.monotonic() < deadline:
            for rank in sorted(missing):
                if self._store.check([f"{self._mark}/stands/{rank}"]):
                    found[rank] = _read(self._store.get(f"{self._mark}/stands/{rank}"))
            missing -= set(found)
            found |= dict.fromkeys(self.exited(missing), Standing(["has exited"]))
            missing -= set(found)
            time.sleep(0.02)
        gone = {rank for standing in found.values() for rank in standing.gone}
        for rank in missing:
            silent = (
                f"waits for no exchange that failed within {_PATIENCE_SECONDS:.0f} s: it computes, or is lost"
            )
            found[rank] = Standing(["has exited" if rank in gone else silent])
        return dict(sorted(found.items()))


def report(standings: Mapping[int, Standing]) -> str:
    """Where the ranks stand, and where their orders part, as lines of text."""
    parted = parting({rank: standing.steps for rank, standing in standings.items()})
    alike: dict[tuple[str, ...], list[int]] = {}  # ranks by what is said of them
    for rank, standing in standings.items():
        alike.setdefault(tuple(standing.says), []).append(rank)
    lines = [] if parted is None else [parted]
    for (first, *rest), ranks in alike.items():
        lines += [f"{ranks_in_words(ranks)}: {first}", *rest]
    return "\n".join(lines)


def _read(text: bytes) -> Standing:
    """What another rank wrote to the store."""
    says, steps, gone = json.loads(text)
    return Standing(says, [(number, tuple(fields), mark) for number, fields, mark in steps], gone)


def _runs(process: int) -> bool:
    try:
        return psutil.Process(process).status() not in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def _machine() -> str:
    """Equal for two processes only if each can see whether the other runs."""
    parts = [platform.node()]
    with contextlib.suppress(OSError):  # Linux alone has them
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return " ".join(parts)
