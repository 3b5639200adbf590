"""Reads and writes a description of a machine (:class:`~impl.plan.step_time.Machine`) as a TOML file.  No torch.

``zeropp calibrate`` writes such a file, and the option ``--machine`` of other commands reads one.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from harness.errors import Refusal, suggestion
from harness.records.trial_record import write_whole, wrong_field
from impl import regular_file
from impl.plan.step_time import Machine

STALE_DAYS: Final = 7  # an older calibration is refused, since kernels, clocks and neighbours change
_WRITE: Final = "run `zeropp calibrate FILE` to write a file for this machine"


def read(path: Path) -> Machine:
    """Read the description of a machine from a file.

    Raises:
        Refusal: If the file cannot be read, or a key is missing, unknown or wrong; the message names the first such
            key.
    """
    try:
        table = tomllib.loads(regular_file.read_text(path, most=1 << 20))
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(
            f"{path}: cannot be read as a machine file: {getattr(error, 'strerror', None) or error}; {_WRITE}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise Refusal(f"{path}: is not TOML, as a machine file must be: {error}; {_WRITE}") from None
    known = [field.name for field in fields(Machine)]
    for key in table:
        if key not in known:
            raise Refusal(
                f"{path}: unknown key {key!r} of a machine: correct or remove it{suggestion(key, known)}"
            )
    try:
        return TypeAdapter(Machine).validate_python(table)
    except ValidationError as error:
        raise Refusal(f"{path}: {wrong_field(error)}") from None


def write(path: Path, machine: Machine) -> None:
    """Write the description of a machine into a TOML file, which :func:`read` can read back.

    Fields that have their default values are left out.
    """
    values = asdict(machine)
    codecs: Mapping[str, Mapping[str, float]] = values.pop("codecs")
    alternatives: Sequence[Mapping[str, float]] = values.pop("alternatives")
    defaults = {field.name: field.default for field in fields(Machine)}
    # Numbers, booleans and text have the same form in TOML as in JSON.
    lines = [f"{name} = {json.dumps(value)}" for name, value in values.items() if value != defaults[name]]
    for codec, cost in codecs.items():
        lines += ["", f"[codecs.{json.dumps(codec)}]", *(f"{key} = {json.dumps(cost[key])}" for key in cost)]
    for changes in alternatives:
        lines += ["", "[[alternatives]]", *(f"{key} = {json.dumps(changes[key])}" for key in changes)]
    write_whole(path, "\n".join(lines) + "\n")


def check_host(path: Path, machine: Machine, host: str) -> None:
    """Check that a machine's description was measured on ``host``, at most :data:`STALE_DAYS` days ago.

    ``path`` is the file of the description, for the message.

    Raises:
        Refusal: If the description was not measured, was measured on another host, or is older.
    """
    again = "run zeropp calibrate here, or leave --machine out"
    if not machine.host:
        source = "data sheets" if machine.nature == "data sheet" else "published numbers"
        raise Refusal(
            f"{path}: this machine's costs are from {source}, but zeropp run needs costs that were measured on this "
            f"host: {again}"
        )
    if machine.host != host:
        raise Refusal(
            f"{path}: this machine was calibrated on {machine.host}, but this host is {host}: {again}"
        )
    try:
        days = (datetime.now(UTC).date() - date.fromisoformat(machine.date)).days
    except ValueError:
        raise Refusal(
            f"{path}: date = {machine.date!r}: expected the day of the calibration, such as 2026-01-31: {again}"
        ) from None
    if days > STALE_DAYS:
        raise Refusal(
            f"{path}: this machine was calibrated {days} days ago, on {machine.date}, but at most {STALE_DAYS} days "
            f"are allowed: {again}"
        )
