"""Keeps a suite's journal: one line for each record that is written, chained by hashes.

Each line holds the SHA-256 of the line before it, so that no line can be removed or changed unnoticed.  A report
compares the records with the journal (:func:`verify`).  The report names records that were deleted or edited, even if
the edited record has a new digest.  It also names trials that were run again although they had a result.  The journal
thus reveals mistakes, and it reveals results that were discarded after somebody had seen them.  It does not reveal that
somebody has written a whole new journal with this program.

A record is written first, and then its line.  If a run is killed between the two, or the disk is full, the record's
field ``entry`` is the number of a line that the journal does not have yet.  The next run adds this line
(:func:`complete`).  No torch.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ValidationError

from harness.records.trial_record import Record, RecordError, digest_of, read_valid, write, write_whole
from harness.suites.labels import counted
from impl import regular_file

JOURNAL: Final = "journal.jsonl"
_MOST_NAMED: Final = 3  # largest number of ids in a sentence
# Fields that are not part of the hashed content.  Role, answer and margin follow from the suite's question, which may
# change later, and the digest changes with them.
_LEFT_OUT: Final = frozenset(("role", "answer", "margin", "digest"))
# The fields that earlier versions left out, which hashed the margin: in lines of their journals, and in the predictions
# that docs/tables/ladder.py registered.
LEFT_OUT_AT_FIRST: Final = _LEFT_OUT - {"margin"}


class Entry(BaseModel, extra="forbid", frozen=True):
    """One line of the journal, which describes one record."""

    number: int  # of the line, from 0
    trial: str  # id of the record's trial
    content: str  # hash of the record, by `content_of`
    failure: str  # kind of the trial's failure; empty if the trial succeeded
    before: str  # SHA-256 of the line before; empty in the first line


def content_of(record: Record, left_out: AbstractSet[str] = _LEFT_OUT) -> str:
    """Return the SHA-256 of a record's content, by which the journal notices that a record was edited.

    Two kinds of fields are not hashed:

    - The fields named in ``left_out``.  By default these are ``digest``, ``role``, ``answer`` and ``margin``.  The last
      three follow from the suite's question, and change with it.
    - The fields that hold their default value, because a later version of the schema may have added them.
    """
    return digest_of(json.loads(record.model_dump_json(exclude=set(left_out), exclude_defaults=True)))


def _lines(path: Path) -> list[str]:
    try:
        return regular_file.read_text(path).splitlines() if path.exists() else []
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror or error}; make it readable") from error
    except ValueError as error:
        raise RecordError(f"{path}: is not a journal: {error}; restore it from a copy") from error


def append(results: Path, record: Record) -> Record:
    """Write a record, and then append the record's line to the journal.

    The line has the hash of the record's content, and the hash of the line before it.

    Returns:
        The record as written.  Its field ``entry`` is the number of its line.

    Raises:
        RecordError: If the record or the journal cannot be written.
    """
    lines = _lines(results / JOURNAL)
    record = record.model_copy(update={"entry": len(lines)})
    write(results, record)
    _write(results, [*lines, _line(lines, record)])
    return record


def complete(results: Path) -> None:
    """Add the line of the last record to the journal, if an earlier run ended before it wrote this line.

    A run writes a record first, and then the record's line.  The journal stays as it is if no line is missing, if
    several lines are missing, or if one of its lines is wrong.

    Raises:
        RecordError: If the journal cannot be read or written.
    """
    lines = _lines(results / JOURNAL)
    record = _without_line(lines, read_valid(results)[0])
    if record is not None:
        _write(results, [*lines, _line(lines, record)])


def _without_line(lines: Sequence[str], records: Sequence[Record]) -> Record | None:
    """Return the record whose line the journal lacks because a run was killed before it wrote the line.

    A killed run leaves at most one record without a line, and this line is to be the next line of the journal.  Returns
    None if no line is missing.  Also returns None if there are signs that somebody has shortened or edited the journal:
    several lines are missing, the missing line is not the next one, or a line is invalid or lacks the hash of the line
    before it.

    Args:
        lines: The lines of the journal.
        records: All records of the folder.
    """
    without = [record for record in records if record.entry is not None and record.entry >= len(lines)]
    if len(without) != 1 or without[0].entry != len(lines) or len(_entries(lines)) < len(lines):
        return None
    return without[0]


def _line(lines: Sequence[str], record: Record) -> str:
    """Return the line for ``record`` that is to be appended to the journal, whose lines so far are ``lines``."""
    return Entry(
        number=len(lines),
        trial=record.id,
        content=content_of(record),
        failure="" if record.failure is None else record.failure.kind,
        before=_hash(lines[-1]) if lines else "",
    ).model_dump_json()


def _write(results: Path, lines: Sequence[str]) -> None:
    write_whole(results / JOURNAL, "\n".join(lines) + "\n")


def verify(results: Path, records: Sequence[Record]) -> list[str]:
    """Compare the records of a folder with the folder's journal.

    Args:
        results: The folder.
        records: The folder's records.

    Returns:
        A sentence for each kind of mismatch, such as records that were edited; an empty list if there is no mismatch.

    Raises:
        RecordError: If the journal cannot be read.
    """
    lines, sentences = _lines(results / JOURNAL), list[str]()
    if (last := _without_line(lines, records)) is not None:
        lines.append(_line(lines, last))
        sentences.append(
            f"The journal lacks the line of the last record, {last.id}, because its run was killed or its disk was "
            "full; the next run of the suite adds the line."
        )
    of_trial: dict[str, list[Entry]] = defaultdict(list)
    for entry in (entries := _entries(lines)):
        of_trial[entry.trial].append(entry)
    by_id = {record.id: record for record in records}
    mismatches = {
        "records were deleted after they were written": [trial for trial in of_trial if trial not in by_id],
        "trials were run again although they had a result": [
            trial for trial, runs in of_trial.items() if not all(entry.failure for entry in runs[:-1])
        ],
        "records were edited after they were written": [
            trial for trial, runs in of_trial.items() if trial in by_id and not _is_of(runs[-1], by_id[trial])
        ],
        "records name a line that is missing from the journal": [
            record.id for record in records if record.entry is not None and record.id not in of_trial
        ],
    }
    if len(entries) < len(lines):
        line = f"line {len(entries) + 1} of {len(lines)}"
        sentences.append(f"The journal was cut or edited: {line} does not follow from the line before it.")
    sentences += [
        f"According to the journal, {mismatch}: {counted(len(trials), 'trial')} ({_first_few(trials)})."
        for mismatch, trials in mismatches.items()
        if trials
    ]
    if older := sum(record.entry is None and record.id not in of_trial for record in records):
        sentences.append(
            f"Not in the journal: {counted(older, 'record')}, written before zeropp kept journals, or changed "
            "since; whether trials were deleted or run again is not known."
        )
    return sentences


def _is_of(entry: Entry, record: Record) -> bool:
    """Return whether a line of the journal has the hash of this record's content."""
    return any(entry.content == content_of(record, left_out) for left_out in (_LEFT_OUT, LEFT_OUT_AT_FIRST))


def _first_few(trials: Sequence[str]) -> str:
    """Return a text with the first three ids and the number of all others, such as ``a, b, c and 4 more``."""
    rest = len(trials) - _MOST_NAMED
    return ", ".join(trials[:_MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _entries(lines: Sequence[str]) -> list[Entry]:
    """Parse the journal's lines, up to the first line that is invalid or lacks the hash of the line before it."""
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
