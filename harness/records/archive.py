"""A suite's records in one compressed file, to be committed or handed on: a plain ``tar.xz``.

It holds the folder of the suite without report and logs.  The same records give the same bytes.
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
_PRESET: Final = 9 | lzma.PRESET_EXTREME  # 5 % less than 9 alone
_MOST: Final = 64 << 20  # bytes of an entry


def pack(folder: Path, into: Path) -> Path:
    """Write records, runs, traces and journal to ``<into>/<folder's name>.tar.xz``; or a RecordError."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise RecordError(f"{folder}: no records in it")
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
                    kinds = "record, run or trace by its name"
                    raise RecordError(f"{path}: no {kinds}, or of more than {_MOST >> 20} MiB")
                archive.addfile(entry, io.BytesIO(content))
    except OSError as error:
        raise RecordError(f"{folder}: cannot read: {error.strerror or error}") from error
    target = into / f"{folder.absolute().name}{SUFFIX}"
    write_whole(target, buffer.getvalue())
    return target


def unpack(archive: Path, into: Path | None = None) -> Path:
    """Write an archive's records into a folder, or beside it; a RecordError for other files or records."""
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
                f"{folder}: has records that {archive.name} has not, the first {others[0].name}"
            )
        journal = folder / JOURNAL  # of records that were unpacked here once, it begins as the archive's
        if journal.exists() and not contents.get(journal, b"").startswith(journal.read_bytes()):
            raise RecordError(f"{folder}: its journal tells of records that {archive.name} has not; move one")
        for path, content in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    except (OSError, tarfile.TarError, lzma.LZMAError, EOFError) as error:
        raise RecordError(f"{archive}: cannot be unpacked: {error}") from error
    return folder
