"""Expectations of what a program sends, as text: ``all_gather int8 <= 0.5 M between nodes``.

The grammar, in which brackets are optional and words may be in any case:

    OPERATION [TYPE] [in PHASE] [over RANKS ranks] RELATION NUMBER UNIT [between nodes | inside nodes | sent]

- OPERATION: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all``, ``broadcast``, ``reduce``,
  ``gather``, ``scatter``, ``send``, ``recv``, or ``all`` for everything;
- TYPE: torch's name of an element type, such as ``int8`` or ``bfloat16``;
- PHASE: ``forward``, ``backward``, ``optimizer`` or ``other``;
- RELATION: ``<=``, ``>=`` or ``==``, which allows 1 % of difference;
- UNIT: ``M``, the bytes of the parameters in 16 bits; ``B``, ``kB``, ``MB`` or ``GB``; or ``calls``.

The number is that of one step.  It counts the whole messages of a rank; with ``sent``, what a rank sends; with
``inside nodes``, what a rank sends to ranks of its own node; with ``between nodes``, what leaves a node.  An
expectation has to hold on every rank (or node) in every step that is reported.
"""

from __future__ import annotations

import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from harness.audit import wire
from harness.audit.calls import PHASES, Calls, Key
from harness.audit.schemes import Model
from harness.errors import Refusal, suggestion

OPERATIONS: Final = (
    "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "reduce", "gather", "scatter", "send",
    "recv", "all",
)  # fmt: skip
_TYPES: Final = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int16", "int32",
    "int64", "bool",
)  # fmt: skip
_UNITS: Final = {"b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9}
_CLOSE: Final = 0.01  # difference that == allows
BYTES_OF_M: Final = 2  # of a parameter, as in ZeRO++'s paper
_FORM: Final = re.compile(
    r"""
    (?P<operation>\w+) (?:\s+(?P<dtype>(?!in\b|over\b)\w+))? (?:\s+in\s+(?P<phase>\w+))?
    (?:\s+over\s+(?P<ranks>\d+)\s+ranks?)?
    \s*(?P<relation><=|>=|==) \s*(?P<number>\d+(?:\.\d*)?|\.\d+) \s*(?P<unit>[a-z]+)
    (?:\s+(?P<place>between\s+nodes|inside\s+nodes|sent))?
    """,
    re.VERBOSE | re.IGNORECASE,
)
FORM: Final = (
    "OPERATION [TYPE] [in PHASE] [over N ranks] <=|>=|== NUMBER M|B|kB|MB|GB|calls "
    "[between nodes|inside nodes|sent]"
)


@dataclass(frozen=True, slots=True)
class Expectation:
    """One expectation, such as ``all_gather int8 <= 0.5 M``; an empty field matches every call."""

    text: str
    operation: str
    relation: str
    number: float
    unit: str
    dtype: str = ""
    phase: str = ""
    ranks: int = 0  # size of the group
    place: str = ""  # "between nodes", "inside nodes", "sent", or empty for whole messages

    def covers(self, key: Key, size: int) -> bool:
        """Return whether the expectation counts calls with the fields ``key``, in a group of ``size`` ranks."""
        return (
            self.operation in ("all", key.operation)
            and self.dtype in ("", key.dtype)
            and self.phase in ("", key.phase)
            and self.ranks in (0, size)
        )

    def holds(self, value: float, bound: float) -> bool:
        """Return whether ``value``, which was measured, has the expectation's relation to ``bound``."""
        match self.relation:
            case "<=":
                return value <= bound * (1 + 1e-9)
            case ">=":
                return value >= bound * (1 - 1e-9)
            case _:
                return abs(value - bound) <= _CLOSE * bound


def parse(text: str) -> Expectation:
    """Return the expectation that a text states.

    Raises:
        Refusal: if the text does not have the form of an expectation, or names something that does not exist.
    """
    found = _FORM.fullmatch(text.strip())
    if found is None:
        raise Refusal(
            f"expectation {text!r}: expected {FORM}, such as 'all_gather int8 <= 0.5 M between nodes'"
        )
    parts = {name: " ".join((value or "").lower().split()) for name, value in found.groupdict().items()}
    for name, known in (("operation", OPERATIONS), ("dtype", _TYPES), ("phase", PHASES)):
        if parts[name] and parts[name] not in known:
            what = {"dtype": "type"}.get(name, name)
            hint = suggestion(parts[name], known)
            raise Refusal(
                f"expectation {text!r}: unknown {what} {parts[name]!r}: expected {', '.join(known)}{hint}"
            )
    if parts["unit"] not in (*_UNITS, "m", "calls"):
        raise Refusal(
            f"expectation {text!r}: unknown unit {found['unit']!r}: expected M, B, kB, MB, GB or calls"
        )
    if parts["unit"] == "calls" and parts["place"]:
        raise Refusal(f"expectation {text!r}: calls have no bytes: remove '{parts['place']}'")
    return Expectation(
        " ".join(text.split()), parts["operation"], parts["relation"], float(parts["number"]), parts["unit"],
        parts["dtype"], parts["phase"], int(parts["ranks"] or 0), parts["place"],
    )  # fmt: skip


def read_file(path: Path) -> list[Expectation]:
    """Read the list ``expect`` of a TOML file.

    Raises:
        Refusal: if the file cannot be read, has other keys, or a text that is no expectation.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise Refusal(f"{path}: cannot be read as TOML: {error}") from error
    if unknown := sorted(set(table) - {"expect"}):
        raise Refusal(f"{path}: unknown key {unknown[0]!r}: expected expect = ['...'] and nothing else")
    texts = table.get("expect", [])
    if not (isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts)):
        raise Refusal(
            f"{path}: expected a list of texts, such as expect = ['all_gather int8 <= 0.5 M between nodes']"
        )
    try:
        return [parse(text) for text in texts]
    except Refusal as error:
        raise Refusal(f"{path}: {error}") from error


def broken(
    expectations: Sequence[Expectation], calls: Calls, steps: Sequence[int], model: Model | None
) -> list[str]:
    """Return a line for each expectation that does not hold, with the first rank or node and step where it does not.

    An expectation that cannot be checked does not hold: an expectation in M if the number of parameters is not known,
    and every expectation if the audit has missed calls.
    """
    made = [
        f"not known to hold: rank {rank.number}: {missed}"
        for rank in calls.ranks
        for missed in rank.missed
        if expectations
    ]
    for expectation in expectations:
        if expectation.unit == "m" and model is None:
            made.append(
                f"not checked: {expectation.text}: no optimizer with parameters was seen: give --model "
                "module:function, or state the number in MB"
            )
            continue
        bound = expectation.number * {
            **_UNITS, "calls": 1.0, "m": BYTES_OF_M * (model.elements if model else 0),
        }[expectation.unit]  # fmt: skip
        for where, step, value in _values(expectation, calls, steps):
            if not expectation.holds(value, bound):
                measured = _in_unit(value, expectation.unit, bound, expectation.number)
                instead = _instead(expectation, calls, step)
                made.append(f"broken: {expectation.text}: {where} has {measured} in step {step}{instead}")
                break
    return made


def _values(expectation: Expectation, calls: Calls, steps: Sequence[int]) -> Iterator[tuple[str, int, float]]:
    """Yield what the expectation counts, as (rank or node, step, bytes or calls)."""
    for step in steps:
        of_node: dict[int, float] = defaultdict(float)
        for rank in calls.ranks:
            value = 0.0
            for key, count in rank.rows.get(step, {}).items():
                group = calls.group(rank, key.group)
                if not expectation.covers(key, group.size):
                    continue
                sent = wire.sent(rank.number, key, count, group, calls.topology)
                value += {
                    "": count.calls if expectation.unit == "calls" else count.bytes,
                    "sent": sent.all, "inside nodes": sent.inside, "between nodes": sent.between,
                }[expectation.place]  # fmt: skip
            of_node[calls.topology.nodes[rank.number]] += value
            if expectation.place != "between nodes":
                yield f"rank {rank.number}", step, value
        if expectation.place == "between nodes":
            yield from ((f"node {node}", step, value) for node, value in sorted(of_node.items()))


def _in_unit(value: float, unit: str, bound: float, number: float) -> str:
    if unit == "calls":
        return f"{value:g} calls"
    if unit == "m" and bound:
        return f"{value * number / bound:.4g} M"
    return f"{value / 1e6:.4g} MB"


def _instead(expectation: Expectation, calls: Calls, step: int) -> str:
    """Return a text with the types in which the operation was called; empty if the expectation names no type."""
    if not expectation.dtype:
        return ""
    types: dict[str, int] = defaultdict(int)
    for rank in calls.ranks[:1]:
        for key, count in rank.rows.get(step, {}).items():
            if expectation.operation in ("all", key.operation) and expectation.phase in ("", key.phase):
                types[key.dtype] += count.bytes
    others = [f"{dtype} ({size / 1e6:.4g} MB)" for dtype, size in sorted(types.items()) if size]
    return f"; {expectation.operation} was called with {', '.join(others) or 'no tensors'}"
