"""A suite's journal: one line for each record that a sweep writes, chained by hashes.

Each line holds the SHA-256 of the line before, so none can be removed or changed alone.  A report names
records that were deleted, edited with a new digest, or run again after a result (:func:`verify`).
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

from harness.records.trial_record import Record, RecordError, digest_of, write, write_whole
from harness.suites.labels import counted

JOURNAL: Final = "journal.jsonl"
_LEFT_OUT: Final = {"role", "answer", "digest"}  # the first two belong to the question, which may change


class Entry(BaseModel, extra="forbid", frozen=True):
    """One line."""

    number: int  # of the line, from 0
    trial: str  # id of the record
    content: str  # `content_of` it
    failure: str  # its kind; empty of a result
    before: str  # SHA-256 of the line before; empty of the first


def content_of(record: Record) -> str:
    """SHA-256 of a record without its role, answer and digest, and without defaults, which may be newer."""
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
    """Sentences on records that do not match their folder's journal; a RecordError if it is unreadable."""
    lines = _lines(results / JOURNAL)
    of_trial: dict[str, list[Entry]] = defaultdict(list)
    for entry in (entries := _entries(lines)):
        of_trial[entry.trial].append(entry)
    by_id = {record.id: record for record in records}
    mismatches = {
        "without a record any more: deleted": [trial for trial in of_trial if trial not in by_id],
        "run again after there was a result: rerun": [
            trial for trial, runs in of_trial.items() if not all(entry.failure for entry in runs[:-1])
        ],
        "with another record than was written: edited": [
            trial
            for trial, runs in of_trial.items()
            if trial in by_id and content_of(by_id[trial]) != runs[-1].content
        ],
        "whose record names a line that it lacks": [
            record.id for record in records if record.entry is not None and record.id not in of_trial
        ],
    }
    sentences = []
    if len(entries) < len(lines):
        line = f"line {len(entries) + 1} of {len(lines)}"
        sentences.append(f"The journal is not whole: {line} does not follow the line before it.")
    sentences += [
        f"By the journal {counted(len(trials), 'trial')} {mismatch} ({', '.join(trials)})."
        for mismatch, trials in mismatches.items()
        if trials
    ]
    if older := sum(record.entry is None and record.id not in of_trial for record in records):
        unknown = "from before sweeps kept one; whether trials were deleted or run again is not known"
        sentences.append(f"Without journal: {counted(older, 'record')}, {unknown}.")
    return sentences


def _entries(lines: Sequence[str]) -> list[Entry]:
    """The entries before the first that does not follow the one before it."""
    entries, before = list[Entry](), ""
    for line in lines:
        try:
            entry = Entry.model_validate_json(line)
        except ValidationError:
            break
        if (entry.number, entry.before) != (len(entries), before):
            break
        entries.append(entry)
        before = _hash(line)
    return entries


def _hash(line: str) -> str:
    return hashlib.sha256(line.encode()).hexdigest()
