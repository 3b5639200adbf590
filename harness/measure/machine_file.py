"""A machine as a small TOML file: what ``zeropp calibrate`` writes, and ``--machine`` reads.  No torch."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, fields
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from harness.errors import Refusal, suggestion
from harness.records.trial_record import wrong_field
from impl import regular_file
from impl.plan.step_time import Machine

STALE_DAYS: Final = 7  # after which a calibration is refused: kernels, clocks and neighbours change


def read(path: Path) -> Machine:
    """Read a machine; a Refusal names the first key that is missing, unknown or wrong."""
    try:
        table = tomllib.loads(regular_file.read_text(path, most=1 << 20))
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except (ValueError, RecursionError) as error:
        raise Refusal(f"{path}: no TOML: {error}") from None
    known = [field.name for field in fields(Machine)]
    for key in table:
        if key not in known:
            raise Refusal(f"{path}: {key}: no key of a machine{suggestion(key, known)}")
    try:
        return TypeAdapter(Machine).validate_python(table)
    except ValidationError as error:
        raise Refusal(f"{path}: {wrong_field(error)}") from None


def write(path: Path, machine: Machine) -> None:
    """Write the fields that differ from their defaults; :func:`read` gives the machine back."""
    values = asdict(machine)
    codecs: Mapping[str, Mapping[str, float]] = values.pop("codecs")
    defaults = {field.name: field.default for field in fields(Machine)}
    # TOML writes numbers, truth values and text as JSON does.
    lines = [f"{name} = {json.dumps(value)}" for name, value in values.items() if value != defaults[name]]
    for codec, cost in codecs.items():
        lines += ["", f"[codecs.{json.dumps(codec)}]", *(f"{key} = {json.dumps(cost[key])}" for key in cost)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def check_host(path: Path, machine: Machine, host: str) -> None:
    """Refuse a machine that was not calibrated on ``host`` within the last :data:`STALE_DAYS` days."""
    if not machine.host:
        made = f"made of {machine.nature}s" if machine.nature == "data sheet" else "as published"
        raise Refusal(f"{path}: a machine {made}, not calibrated: nothing is run by it; zeropp calibrate")
    if machine.host != host:
        raise Refusal(f"{path}: calibrated on {machine.host}, and this is {host}; zeropp calibrate")
    if (days := (datetime.now(UTC).date() - date.fromisoformat(machine.date)).days) > STALE_DAYS:
        raise Refusal(f"{path}: calibrated {days} days ago, on {machine.date}; at most {STALE_DAYS}")
