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
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import psutil
from torch.distributed.distributed_c10d import Store

from impl.comm.fingerprint import CollectiveLog, Step, parting, told
from impl.plan.topology import ranks_in_words

_PATIENCE_SECONDS: Final = 5.0  # for what others write
_SHOWN: Final = 3  # exchanges of a rank


class DesyncReporter:
    """Writes where this rank stands, and collects where the others do.

    Wires are told apart by their number on each rank, so all ranks must make theirs in one order.

    Args:
        store: shared by all ranks.
    """

    def __init__(self, store: Store, rank: int, world: int, collective_log: CollectiveLog) -> None:
        self._store, self._rank, self._world, self._log = store, rank, world, collective_log
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
        log, steps = self._log, self._log.steps()
        says = [does, *(f"    opened {told(step)}" for step in steps[-_SHOWN:])]
        if log.finished is not None:
            says.append(f"    finished last: {told(log.finished)}")
        standing = says, steps, self.exited(range(self._world))
        self._store.set(f"{self._mark}/stands/{self._rank}", json.dumps(standing))

    def report(self) -> str:
        """Where the ranks stand, and where their orders part, as lines of text.

        Takes up to 5 s; ends at once when all have written or exited.

        Raises:
            RuntimeError: where the store cannot be reached.
        """
        says: dict[int, str] = {}
        histories: dict[int, Sequence[Step]] = {}
        gone: set[int] = set()
        missing = set(range(self._world))
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while missing and time.monotonic() < deadline:
            for rank in sorted(missing):
                if self._store.check([f"{self._mark}/stands/{rank}"]):
                    lines, histories[rank], theirs = json.loads(
                        self._store.get(f"{self._mark}/stands/{rank}")
                    )
                    says[rank] = "\n".join(lines)
                    gone.update(theirs)
            missing -= says.keys()
            gone.update(self.exited(missing))
            missing -= gone
            time.sleep(0.02)
        silent = (
            f"waits for no exchange that failed within {_PATIENCE_SECONDS:.0f} s: it computes, or is lost"
        )
        alike: dict[str, list[int]] = {}  # ranks by what is said of them
        for rank in range(self._world):
            alike.setdefault(says.get(rank, "has exited" if rank in gone else silent), []).append(rank)
        parted = parting(histories)
        lines = [] if parted is None else [parted]
        return "\n".join([*lines, *(f"{ranks_in_words(ranks)}: {said}" for said, ranks in alike.items())])


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
