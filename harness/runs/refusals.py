"""What is refused before a run's first trial: a folder that it cannot join, and what cannot run here."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from harness.errors import Refusal
from harness.measure import machine
from harness.records.record import Record, path_of, read, read_all
from harness.runs.forecast import Forecast
from harness.suites.labels import at, counted, told
from harness.suites.trial import Trial
from harness.workloads.input_digests import digests, own_objects


def check_folder(folder: Path) -> list[Record]:
    """The records of a results folder; refuses one that cannot be written, or that this run cannot join."""
    pool = machine.pool_key(machine.facts(), machine.code())
    there = read_all(folder) if folder.is_dir() else []
    strange = [record for record in there if record.measured and record.pool != pool]
    if strange:
        raise Refusal(
            f"{folder}: holds {counted(len(strange), 'record')} of another machine or code (hash "
            f"{strange[0].pool}, here {pool}), which are not put together; {_aside(folder)}"
        )
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise Refusal(f"{folder}: results folder not writable: {place}: {error.strerror}") from None
    return there


def check_inputs(folder: Path, trials: Sequence[Trial]) -> None:
    """Refuse to skip trials whose corpus or model is no longer what their records were made of."""
    for trial in trials:
        path = path_of(folder, trial.id)
        record = read(path) if path.exists() else None
        if record is None or not record.settled or not record.measured:
            continue
        then, now = record.inputs, digests(trial)
        for name in sorted(then.keys() | now.keys()):
            before, after = then.get(name, "none")[:12], now.get(name, "none")[:12]
            if then.get(name) != now.get(name):
                source = trial.corpus if name == "corpus" else own_objects(trial).get(name, name)
                what = name.partition(" ")[0]
                raise Refusal(
                    f"{path}: was made of another {what} {source!r} (SHA-256 {before}, now {after}), "
                    f"and results of both are not put together; {_aside(folder)}"
                )


def _aside(folder: Path) -> str:
    """What to do with a folder that a run cannot go on with."""
    return (
        f"keep it under another name (mv {folder} {folder}-before), or choose another folder with --results"
    )


def check_feasible(file: Path, found: Sequence[Forecast]) -> None:
    """Refuse a suite with a trial that cannot run here; ``plan`` shows them all."""
    impossible = [one for one in found if one.problems]
    if not impossible:
        return
    first = impossible[0].trial.canonical()
    cell = ", ".join(f"{path} = {at(first, path)}" for path in told([one.trial.canonical() for one in found]))
    raise Refusal(
        f"{file}: {len(impossible)} of {len(found)} trials cannot run here; the first"
        f"{f' ({cell})' if cell else ''}: {impossible[0].problems[0]}"
    )
