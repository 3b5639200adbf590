"""A lease on a results folder: one run writes there, also where hosts share the folder and no lock is seen.

The run that holds it renews it every few seconds.  A lease that was not renewed for a while is of a run that
ended without a word, and may be taken over; a run that was suspended so long finds that, and stops.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from harness.records.record import RecordError

LEASE: Final = ".lease"
RENEWED_SECONDS: Final = 5.0
STALE_SECONDS: Final = 60.0
_SWEEP: Final = "\0zeropp-sweep"  # an abstract Unix-domain address, free again when its process ends


@contextlib.contextmanager
def sharing_machine() -> Iterator[int | None]:
    """Be this machine's sweep in the body; yields the process of one that already is, whatever its folder."""
    if not sys.platform.startswith("linux"):
        yield None
        return
    with socket.socket(socket.AF_UNIX) as own:
        try:
            own.bind(_SWEEP)
            own.listen()
        except OSError:
            yield _process_of_sweep()
        else:
            yield None


def _process_of_sweep() -> int | None:
    """The process that holds the address; None if it has ended since."""
    with socket.socket(socket.AF_UNIX) as other, contextlib.suppress(OSError):
        other.connect(_SWEEP)
        credentials = other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        process: int = struct.unpack("3i", credentials)[0]
        return process
    return None


@dataclass(slots=True)
class Lease:
    """That of this run, a context manager; ``token`` is in its file as long as it is this run's."""

    folder: Path
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    _ended: threading.Event = field(default_factory=threading.Event)
    _renewing: threading.Thread | None = None

    def __enter__(self) -> Self:
        """Take it; a RecordError if another run has it, or the folder cannot be written."""
        try:
            self._take()
        except OSError as error:
            raise RecordError(f"{self.folder}: cannot write there: {error.strerror or error}") from error
        self._renewing = threading.Thread(target=self._renew, daemon=True, name="lease")
        self._renewing.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._renewing is not None:
            self._renewing.join()
        with contextlib.suppress(OSError, RecordError):
            self.check()
            (self.folder / LEASE).unlink()

    def check(self) -> None:
        """Refuse to go on once another run has the folder, by a RecordError."""
        if (found := _read(self.folder / LEASE)) is not None and found.get("token") != self.token:
            raise RecordError(
                f"{self.folder}: a run on host {found.get('host')} took it over, since this one did not "
                f"renew its lease for {STALE_SECONDS:g} s; nothing more is written"
            )

    def _take(self) -> None:
        """Have the file, unless a run of another host renewed its own lately; one of this has the lock."""
        path = self.folder / LEASE
        if self._made(path):
            return
        found = self._left_behind(path)
        # Of several that find it left behind, one makes this file.  One that comes late can make it too, once
        # the first has moved its own: so what is taken over is looked at again, now that no other moves it.
        claim = path.with_name(f"{LEASE}.{found.get('token', '')}")
        if not self._made(claim):
            if self._age(claim) > STALE_SECONDS:
                claim.unlink(missing_ok=True)
            raise RecordError(f"{self.folder}: another run is taking it over from one that ended; try again")
        try:
            unchanged = self._left_behind(path) == found and path.exists()
            if unchanged:
                claim.replace(path)
        finally:
            claim.unlink(missing_ok=True)
        if not unchanged:
            raise RecordError(f"{self.folder}: another run took it over from one that ended; try again")

    def _left_behind(self, path: Path) -> dict[str, str]:
        """The lease of a run that has ended; a RecordError if a run of another host renewed it lately."""
        found, age = _read(path) or {}, self._age(path)
        if found.get("kernel") != _kernel() and age < STALE_SECONDS:
            raise RecordError(
                f"{self.folder}: a run on host {found.get('host', '?')} is writing there (it said so "
                f"{max(age, 0):.0f} s ago); wait for it, or choose other --results"
            )
        return found

    def _made(self, path: Path) -> bool:
        """Whether there was no such file, and now there is this run's."""
        try:
            with path.open("x", encoding="utf-8") as file:
                json.dump({"token": self.token, "host": socket.gethostname(), "kernel": _kernel()}, file)
        except FileExistsError:
            return False
        return True

    def _age(self, path: Path) -> float:
        """Seconds since a file was renewed; endless if it is gone."""
        try:
            return self._now() - path.stat().st_mtime
        except FileNotFoundError:
            return math.inf

    def _now(self) -> float:
        """The file system's time: hosts' clocks differ."""
        with tempfile.NamedTemporaryFile(dir=self.folder, prefix=LEASE) as file:
            return os.fstat(file.fileno()).st_mtime

    def _renew(self) -> None:
        while not self._ended.wait(RENEWED_SECONDS):
            with contextlib.suppress(OSError, RecordError):  # a full disk passes; another's is not renewed
                self.check()
                os.utime(self.folder / LEASE)


def _kernel() -> str:
    """What two runs share if one's lock holds the other off."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def _read(path: Path) -> dict[str, str] | None:
    """What a lease says; None if it is not there, or says nothing."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
