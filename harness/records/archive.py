"""Packs a suite's records into one compressed file, a plain ``tar.xz``, and unpacks it.

The archive holds the suite's results folder without report and logs: records, runs, traces and journal.  The same
records always give the same bytes, so that an archive can be committed.
"""

from __future__ import annotations

import io
import lzma
import re
import tarfile
from pathlib import Path
from typing import Final

from harness.records.chained_journal import JOURNAL
from harness.records.trial_record import RecordError, write_whole

SUFFIX: Final = ".tar.xz"
_NAME: Final = re.compile(
    r"([A-Za-z0-9_][A-Za-z0-9_.-]*)/"
    r"(([0-9a-f]{12}|runs/[0-9a-f]{16}|traces/trace-[0-9a-f]{12})\.json|journal\.jsonl)"
)
_PRESET: Final = 9 | lzma.PRESET_EXTREME  # 5 % smaller than preset 9 alone
_MOST: Final = 64 << 20  # bytes that an entry of the archive may have


def pack(folder: Path, into: Path) -> Path:
    """Write records, runs, traces and journal of a results folder to ``<into>/<folder's name>.tar.xz``.

    Returns:
        The path of the archive.

    Raises:
        RecordError: If the folder holds no records, a file that is none by its name or size, or cannot be read.
    """
    files = sorted(folder.glob("*.json"))
    if not files:
        raise RecordError(f"{folder}: no records in it; run its suite first, or name another folder")
    for pattern in ("runs/*.json", "traces/trace-*.json", JOURNAL):
        files += sorted(folder.glob(pattern))
    buffer = io.BytesIO()
    try:
        with tarfile.open(  # type: ignore[call-overload]  # typed for presets that are not extreme
            fileobj=buffer, mode="w:xz", format=tarfile.USTAR_FORMAT, preset=_PRESET
        ) as archive:
            for path in files:
                entry = tarfile.TarInfo(f"{folder.absolute().name}/{path.relative_to(folder).as_posix()}")
                content = path.read_bytes()
                entry.size = len(content)
                if _NAME.fullmatch(entry.name) is None or entry.size > _MOST:
                    reason = f"no record, run or trace by its name, or larger than {_MOST >> 20} MiB"
                    raise RecordError(f"{path}: {reason}; move it out of the folder")
                archive.addfile(entry, io.BytesIO(content))
    except OSError as error:
        raise RecordError(f"{folder}: cannot read: {error.strerror or error}") from error
    target = into / f"{folder.absolute().name}{SUFFIX}"
    write_whole(target, buffer.getvalue())
    return target


def unpack(archive: Path, into: Path | None = None) -> Path:
    """Write an archive's records into a folder named after its suite.

    Args:
        archive: The archive; its name is the suite's.
        into: Where the suite's folder is made; by default the archive's own folder.

    Returns:
        The suite's folder.

    Raises:
        RecordError: If the archive holds anything but the suite's records, or the folder has records or a journal
            that the archive lacks.
    """
    suite = archive.name.removesuffix(SUFFIX)
    into = archive.parent if into is None else into
    folder = into / suite
    try:
        with tarfile.open(archive, mode="r:xz") as file:
            for entry in (entries := file.getmembers()):
                match = _NAME.fullmatch(entry.name)
                if match is None or match[1] != suite or not entry.isfile() or entry.size > _MOST:
                    raise RecordError(f"{archive}: holds {entry.name!r}, which is no record of suite {suite}")
            read = [(entry, file.extractfile(entry)) for entry in entries]
            contents = {into / entry.name: file.read() if file else b"" for entry, file in read}
        if others := sorted(set(folder.glob("*.json")) - contents.keys()):
            raise RecordError(
                f"{folder}: has records that {archive.name} lacks, the first {others[0].name}; move one of the two"
            )
        # If an earlier version of the archive was unpacked here, its journal is the beginning of this one's.
        journal = folder / JOURNAL
        if journal.exists() and not contents.get(journal, b"").startswith(journal.read_bytes()):
            raise RecordError(
                f"{folder}: its journal lists records that {archive.name} lacks; move one of the two"
            )
        for path, content in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    except (OSError, tarfile.TarError, lzma.LZMAError, EOFError) as error:
        raise RecordError(f"{archive}: cannot be unpacked: {error}") from error
    return folder
