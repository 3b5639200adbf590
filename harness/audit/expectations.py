"""Expectations of what a program sends, as text: ``all_gather int8 <= 0.5 M between nodes``.

The grammar, in which parts in brackets may be left out, and upper and lower case are the same:

    OPERATION [TYPE] [in PHASE] [over RANKS ranks] RELATION NUMBER UNIT [between nodes | inside nodes | sent]

- OPERATION: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all``, ``broadcast``, ``reduce``,
  ``gather``, ``scatter``, ``send``, ``recv``, or ``all`` for the sum of all operations;
- TYPE: torch's name of an element type, such as ``int8`` or ``bfloat16``;
- PHASE: ``forward``, ``backward``, ``optimizer`` or ``other``;
- RANKS: number of ranks of the process group;
- RELATION: ``<=``, ``>=`` or ``==`` (``==`` allows 1 % of difference);
- UNIT: ``M``, which is 2 bytes for each parameter of the model; ``B``, ``kB``, ``MB`` or ``GB``; or ``calls``.

NUMBER is compared with the bytes or calls of one step:

| words at the end | bytes that are counted |
| --- | --- |
| none | whole messages of a rank; the whole message of an all-gather is the gathered tensor |
| ``sent`` | what a rank sends to all other ranks |
| ``inside nodes`` | what a rank sends to the other ranks of the rank's node |
| ``between nodes`` | what all ranks of a node together send to other nodes |

An expectation must hold in every reported step, on every rank or, with ``between nodes``, on every node.
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
from impl import regular_file

OPERATIONS: Final = (
    "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "reduce", "gather", "scatter", "send",
    "recv", "all",
)  # fmt: skip
_TYPES: Final = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int16", "int32",
    "int64", "bool",
)  # fmt: skip
_UNITS: Final = {"b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9}
_CLOSE: Final = 0.01  # relative difference that == allows
BYTES_OF_M: Final = 2  # bytes of each parameter that the unit M counts, as in ZeRO++'s paper
_FORM: Final = re.compile(
    r"""
    (?P<operation>\w+) (?:\s+(?P<dtype>(?!in\b|over\b)\w+))? (?:\s+in\s+(?P<phase>\w+))?
    (?:\s+over\s+(?P<ranks>\d{1,18})\s+ranks?)?
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
    """One expectation of what a program sends, such as ``all_gather int8 <= 0.5 M``.

    An empty type or phase, and 0 ranks, match every call.
    """

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
        """Return whether the expectation counts a call that has the fields ``key`` and a group of ``size`` ranks."""
        return (
            self.operation in ("all", key.operation)
            and self.dtype in ("", key.dtype)
            and self.phase in ("", key.phase)
            and self.ranks in (0, size)
        )

    def holds(self, value: float, bound: float) -> bool:
        """Return whether the measured ``value`` satisfies the expectation.

        ``bound`` is the expectation's number, converted to the unit of ``value``.  The two are compared by the
        expectation's relation ``<=``, ``>=`` or ``==``; ``==`` allows 1 % of difference.
        """
        match self.relation:
            case "<=":
                return value <= bound * (1 + 1e-9)
            case ">=":
                return value >= bound * (1 - 1e-9)
            case _:
                return abs(value - bound) <= _CLOSE * bound


def parse(text: str) -> Expectation:
    """Parse the text of an expectation.

    Raises:
        Refusal: If the text does not have the form of an expectation, or if it names an operation, type, phase or unit
            that does not exist.
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
        raise Refusal(
            f"expectation {text!r}: '{parts['place']}' selects bytes, but the unit is calls: remove '{parts['place']}'"
        )
    return Expectation(
        " ".join(text.split()), parts["operation"], parts["relation"], float(parts["number"]), parts["unit"],
        parts["dtype"], parts["phase"], int(parts["ranks"] or 0), parts["place"],
    )  # fmt: skip


def read_file(path: Path) -> list[Expectation]:
    """Return the expectations in the list ``expect`` of a TOML file.

    Raises:
        Refusal: If the file cannot be read, has other keys, or has no such list, or if a text in the list is not an
            expectation.
    """
    try:
        table = tomllib.loads(regular_file.read_text(path))
    except (OSError, ValueError, RecursionError) as error:  # numbers and nesting may exceed Python's limits
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
    """Return a line for each expectation that does not hold or cannot be checked.

    The line for a broken expectation names the first step in which it is broken, the rank or node, and what was
    measured there.  An expectation with the unit M (bytes of all parameters in 16 bits) cannot be checked if the number
    of parameters is not known.

    An expectation may be broken by calls that the audit has missed.  If the audit has missed calls on a rank, the list
    therefore begins with lines that say so.
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
    """Yield (name, step, value), where ``value`` is the measured bytes or calls that the expectation limits.

    For an expectation ``between nodes`` there is a value for each node, and ``name`` is such as ``node 1``.  For any
    other expectation there is a value for each rank, and ``name`` is such as ``rank 3``.
    """
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
    """Return text that says which types were sent in ``step`` instead of the type that an expectation names.

    :func:`broken` appends the text to the line on the broken expectation, for example
    ``; all_gather was called with bfloat16 (12 MB)``.  The bytes are those of the first rank's calls that have the
    expectation's operation and phase.  The text is empty if the expectation names no type.
    """
    if not expectation.dtype:
        return ""
    types: dict[str, int] = defaultdict(int)
    for rank in calls.ranks[:1]:
        for key, count in rank.rows.get(step, {}).items():
            if expectation.operation in ("all", key.operation) and expectation.phase in ("", key.phase):
                types[key.dtype] += count.bytes
    others = [f"{dtype} ({size / 1e6:.4g} MB)" for dtype, size in sorted(types.items()) if size]
    return f"; {expectation.operation} was called with {', '.join(others) or 'no tensors'}"
