"""A suite's journal: one line for each record that a sweep writes, chained by hashes.

Each line holds the SHA-256 of the line before, so none can be taken out or changed alone.  A report names
records that were deleted, edited with their digest made anew, or run again after a result (:func:`verify`).
It cannot stop a forger who has this program.  No torch.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ValidationError

from harness.records.record import Record, RecordError, digest_of, write, write_whole
from harness.suites.labels import counted

JOURNAL: Final = "journal.jsonl"
_LEFT_OUT: Final = {"role", "answer", "digest"}  # the first two are the question's, which may change


class Entry(BaseModel, extra="forbid", frozen=True):
    """One line."""

    number: int  # of the line, from 0
    trial: str  # id of the record
    content: str  # `content_of` it
    failure: str  # its kind; empty of a result
    before: str  # SHA-256 of the line before; empty of the first


def content_of(record: Record) -> str:
    """SHA-256 of a record but for what a changed question rewrites, and for defaults: they may be newer."""
    return digest_of(json.loads(record.model_dump_json(exclude=_LEFT_OUT, exclude_defaults=True)))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    except (OSError, ValueError) as error:
        raise RecordError(f"{path}: cannot read: {error}") from error


def append(results: Path, record: Record) -> Record:
    """Write a line and then the record, or raise a RecordError; returns the record with its line's number."""
    path = results / JOURNAL
    lines = _lines(path)
    record = record.model_copy(update={"entry": len(lines)})
    entry = Entry(
        number=len(lines),
        trial=record.id,
        content=content_of(record),
        failure="" if record.failure is None else record.failure.kind,
        before=_hash(lines[-1]) if lines else "",
    )
    write_whole(path, "\n".join([*lines, entry.model_dump_json()]) + "\n")
    write(results, record)
    return record


def verify(results: Path, records: Sequence[Record]) -> list[str]:
    """In what records are unlike their folder's journal, in sentences; a RecordError if it cannot be read."""
    lines = _lines(results / JOURNAL)
    of_trial: dict[str, list[Entry]] = defaultdict(list)
    for entry in (entries := _entries(lines)):
        of_trial[entry.trial].append(entry)
    there = {record.id: record for record in records}
    named = {
        "without a record any more: deleted": [trial for trial in of_trial if trial not in there],
        "run again after there was a result: rerun": [
            trial for trial, told in of_trial.items() if not all(entry.failure for entry in told[:-1])
        ],
        "with another record than was written: edited": [
            trial
            for trial, told in of_trial.items()
            if trial in there and content_of(there[trial]) != told[-1].content
        ],
        "whose record names a line that it lacks": [
            one.id for one in records if one.entry is not None and one.id not in of_trial
        ],
    }
    found = []
    if len(entries) < len(lines):
        where = f"line {len(entries) + 1} of {len(lines)}"
        found.append(f"The journal is not whole: {where} does not follow the line before it.")
    found += [
        f"By the journal {counted(len(trials), 'trial')} {what} ({', '.join(trials)})."
        for what, trials in named.items()
        if trials
    ]
    if older := sum(one.entry is None and one.id not in of_trial for one in records):
        unknown = "whether trials were deleted or run again is not known"
        found.append(f"Without journal: {counted(older, 'record')}, from before sweeps kept one; {unknown}.")
    return found


def _entries(lines: Sequence[str]) -> list[Entry]:
    """The lines up to the first that does not follow the one before."""
    found, before = list[Entry](), ""
    for line in lines:
        try:
            entry = Entry.model_validate_json(line)
        except ValidationError:
            break
        if (entry.number, entry.before) != (len(found), before):
            break
        found.append(entry)
        before = _hash(line)
    return found


def _hash(line: str) -> str:
    return hashlib.sha256(line.encode()).hexdigest()
