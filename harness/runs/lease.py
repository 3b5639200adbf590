"""A lease on a results folder: one run writes there, also where hosts share the folder and no lock is seen.

The run that holds it renews it every few seconds.  A lease that was not renewed for a while is of a run that
ended without a word, and may be taken over; a run that was suspended so long finds that, and stops.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from harness.records.record import RecordError

LEASE: Final = ".lease"
RENEWED_SECONDS: Final = 5.0
STALE_SECONDS: Final = 60.0
SETTLED_SECONDS: Final = 1.0  # after which all that took a lease over at once have written it
_SWEEP: Final = "\0zeropp-sweep"  # an abstract Unix-domain address, free again when its process ends


@contextlib.contextmanager
def sharing_machine() -> Iterator[bool]:
    """Be this machine's sweep in the body; yields whether another one already is, whatever its folder."""
    with socket.socket(socket.AF_UNIX) as own:
        try:
            own.bind(_SWEEP)
        except OSError:
            yield True
        else:
            yield False


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
        """Have the file, unless a run of another host renewed its own lately; one of this has the lock.

        Of several hosts that find it left behind the last one that writes it has it: each looks again.
        """
        path = self.folder / LEASE
        mine = {"token": self.token, "host": socket.gethostname(), "kernel": _kernel()}
        with contextlib.suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
            json.dump(mine, file)
            return
        found = _read(path) or {}
        elsewhere = found.get("kernel") != mine["kernel"]
        with tempfile.NamedTemporaryFile("w", dir=self.folder, prefix=LEASE, delete=False) as beside:
            json.dump(mine, beside)
        made = Path(beside.name)
        try:
            age = made.stat().st_mtime - path.stat().st_mtime  # both the file system's: hosts' clocks differ
            if elsewhere and age < STALE_SECONDS:
                raise RecordError(
                    f"{self.folder}: a run on host {found.get('host', '?')} is writing there (it said so "
                    f"{max(age, 0):.0f} s ago); wait for it, or choose other --results"
                )
            made.replace(path)
        finally:
            made.unlink(missing_ok=True)
        if elsewhere:
            time.sleep(SETTLED_SECONDS)
            self.check()

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
