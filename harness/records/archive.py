"""Packs a suite's records into one compressed file, a plain ``tar.xz``, and unpacks it.

The archive holds the suite's results folder without report and logs: the records of trials, descriptions of the runs in
which the trials ran (``runs/``), traces and the journal (one line for each written record).  The same records always
give the same bytes, so that an archive can be committed.
"""

from __future__ import annotations

import io
import lzma
import os
import re
import tarfile
from pathlib import Path
from typing import BinaryIO, Final, Self

from harness.records.chained_journal import JOURNAL
from harness.records.trial_record import RecordError, write_whole
from harness.whole_file import temporary_folder
from impl import regular_file

SUFFIX: Final = ".tar.xz"
_NAME: Final = re.compile(
    r"([A-Za-z0-9_][A-Za-z0-9_.-]{0,154})/"  # tar has room for 155 characters of a folder's name
    r"(([0-9a-f]{12}|runs/[0-9a-f]{16}|traces/trace-[0-9a-f]{12})\.json|journal\.jsonl)"
)
_PRESET: Final = 9 | lzma.PRESET_EXTREME  # 5 % smaller than preset 9 alone
_MOST: Final = regular_file.MOST  # bytes that an entry of the archive may have
_MOST_IN_ALL: Final = 1 << 30  # bytes that all entries may have together
_MOST_ENTRIES: Final = 20_000  # one for each of at most 2,000 trials, and further ones for runs and traces
_MOST_DECODER: Final = 256 << 20  # bytes of memory for decompressing; archives of this project take 65 MiB
_CHUNK: Final = 1 << 16


def pack(folder: Path, into: Path, name: str = "") -> Path:
    """Pack a results folder into the archive ``<into>/<name>.tar.xz``, and return the path of the archive.

    The archive holds the folder's records, descriptions of runs (``runs/``), traces and journal.  In the archive, these
    files lie in a folder that is also called ``name``; by default ``name`` is the name of the results folder.

    Raises:
        RecordError: If the folder holds no records, or more files or bytes than an archive may have.  Also if a file
            cannot be read, is too large, or has a name that an archive does not allow.
    """
    name = name or Path(os.path.abspath(folder)).name  # noqa: PTH100  # resolve() would follow a link
    files = sorted(folder.glob("*.json"))
    if not files:
        raise RecordError(
            f"{folder}: there are no records in it; run its suite first, or name another folder"
        )
    for pattern in ("runs/*.json", "traces/trace-*.json", JOURNAL):
        files += sorted(folder.glob(pattern))
    buffer, total = io.BytesIO(), 0
    try:
        with tarfile.open(  # type: ignore[call-overload]  # typed for presets that are not extreme
            fileobj=buffer, mode="w:xz", format=tarfile.USTAR_FORMAT, preset=_PRESET
        ) as archive:
            for path in files:
                entry = tarfile.TarInfo(f"{name}/{path.relative_to(folder).as_posix()}")
                content = regular_file.read_bytes(path)
                entry.size = len(content)
                total += entry.size
                if _NAME.fullmatch(entry.name) is None or entry.size > _MOST:
                    reason = f"is larger than {_MOST >> 20} MiB, or archives do not allow its name or its folder's name"
                    raise RecordError(f"{path}: {reason}; move the file elsewhere, or rename the folder")
                if total > _MOST_IN_ALL or len(files) > _MOST_ENTRIES:
                    limits = f"{_MOST_ENTRIES} files or {_MOST_IN_ALL >> 30} GiB in all"
                    raise RecordError(
                        f"{folder}: holds more than {limits}, the most that an archive may have; move some of its "
                        "files into another folder"
                    )
                archive.addfile(entry, io.BytesIO(content))
    except OSError as error:
        raise RecordError(f"{error.filename or folder}: cannot be read: {error.strerror or error}") from error
    target = into / f"{name}{SUFFIX}"
    write_whole(target, buffer.getvalue())
    return target


def unpack(archive: Path, into: Path | None = None) -> Path:
    """Unpack an archive into the suite's folder, ``<into>/<suite's name>``.

    Files of the archive replace files of the same name in this folder.  All checks are made before any file in
    the folder is changed.

    Args:
        archive: Path of the archive, whose file name must be ``<suite's name>.tar.xz``.
        into: The folder in which the suite's folder is made; by default the folder that holds the archive.

    Returns:
        The suite's folder.

    Raises:
        RecordError: If the archive cannot be read, holds too much, or holds a file that does not belong to the suite.
            Also if the suite's folder exists already, and has records or lines of the journal that the archive lacks.
    """
    suite = archive.name.removesuffix(SUFFIX)
    into = archive.parent if into is None else into
    folder = into / suite
    try:
        into.mkdir(parents=True, exist_ok=True)
        with temporary_folder(into) as staging:
            _extract(archive, suite, staging)
            _merge(archive, staging, folder)
    except _OtherEntryError as error:
        raise RecordError(
            f"{archive}: holds {error.args[0]!r}, which is no file of suite {suite} or is larger than {_MOST >> 20} "
            f"MiB; if the archive was renamed, rename it back to FOLDER{SUFFIX}, where FOLDER is the name of the "
            "packed folder; otherwise pack the folder again"
        ) from None
    except (tarfile.TarError, lzma.LZMAError, EOFError, ValueError) as error:
        raise RecordError(
            f"{archive}: cannot be unpacked: {error}; copy or download the archive again"
        ) from error
    except OSError as error:
        where = "" if error.filename in (None, str(archive)) else f"{error.filename}: "
        raise RecordError(f"{archive}: cannot be unpacked: {where}{error.strerror or error}") from error
    return folder


def _extract(archive: Path, suite: str, staging: Path) -> None:
    """Write an archive's entries into the empty folder ``staging``, one after the other.

    Raises:
        RecordError: If the archive holds too many entries, or too many bytes.
        _OtherEntryError: If an entry is no record, run, trace or journal of ``suite``, or is too large.
    """
    regular_file.status(archive)
    count = total = 0
    with (
        archive.open("rb") as packed,
        tarfile.open(fileobj=_Unpacked(packed), mode="r|", tarinfo=_PlainEntry) as file,  # type: ignore[call-overload]
    ):
        for entry in file:
            match = _NAME.fullmatch(entry.name)
            if match is None or match[1] != suite or not 0 <= entry.size <= _MOST:
                raise _OtherEntryError(entry.name)
            count, total = count + 1, total + entry.size
            if count > _MOST_ENTRIES or total > _MOST_IN_ALL:
                limits = f"{_MOST_ENTRIES} files or {_MOST_IN_ALL >> 30} GiB in all"
                raise RecordError(
                    f"{archive}: holds more than {limits}; nothing was unpacked: pack fewer records"
                )
            if (content := file.extractfile(entry)) is not None:
                (staging / match[2]).parent.mkdir(exist_ok=True)
                (staging / match[2]).write_bytes(content.read())


def _merge(archive: Path, staging: Path, folder: Path) -> None:
    """Move the unpacked files of ``archive`` from the folder ``staging`` into the suite's folder ``folder``.

    Raises:
        RecordError: If the suite's folder has records or lines of the journal that the archive lacks.  In this case no
            file is moved.
    """
    fresh = {path.relative_to(staging) for path in staging.rglob("*") if path.is_file()}
    if others := sorted({path.relative_to(folder) for path in folder.glob("*.json")} - fresh):
        raise RecordError(
            f"{folder}: has records that {archive.name} lacks, such as {others[0].name}; "
            "move the folder or the archive elsewhere"
        )
    # If an earlier version of the archive was unpacked here, its journal is the beginning of this one's.
    journal, new = folder / JOURNAL, staging / JOURNAL
    if journal.exists():
        old = regular_file.read_bytes(journal)
        if not (new.read_bytes() if new.exists() else b"").startswith(old):
            raise RecordError(
                f"{folder}: its journal has lines that {archive.name} lacks; "
                "move the folder or the archive elsewhere"
            )
    for path in sorted(fresh):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (staging / path).replace(folder / path)


class _OtherEntryError(Exception):
    """Raised if an entry of an archive is no file of its suite, or is too large; ``args[0]`` is the entry's name."""


class _PlainEntry(tarfile.TarInfo):
    """An entry of an archive, which must be a plain file.

    Links, folders and extended headers are refused before :mod:`tarfile` reads their content into memory.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        entry = super().frombuf(buf, encoding, errors)
        if entry.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
            raise _OtherEntryError(entry.name)
        return entry


class _Unpacked:
    """The decompressed content of an ``xz`` file, as a stream for :mod:`tarfile`."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MOST_DECODER)

    def read(self, size: int) -> bytes:
        """Return at most ``size`` bytes, or no bytes at the end; raise an EOFError if the file ends early."""
        while not self._decoder.eof:
            packed = self._file.read(_CHUNK) if self._decoder.needs_input else b""
            if not packed and self._decoder.needs_input:
                raise EOFError("the file ends before its last entry")
            if content := self._decoder.decompress(packed, size):
                return content
        return b""
