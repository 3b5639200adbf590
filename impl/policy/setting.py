"""Declares the fields of a policy: one :class:`Setting` for each field, next to the field's type and default.

Several parts of the project read these settings: the parser of suites (keys ``policy.*``), the names of configurations,
error messages and the guide's tables.  If a new field is declared by :func:`setting`, these parts know the new field
without a change to their code.

Pure: no torch.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Final, Literal, TypeVar, get_origin, get_type_hints

from impl.policy.topology import ranks_in_words

Scope = Literal["all", "training", "links", "stage 3"]

_Value = TypeVar("_Value")
_RECORD: Final = "setting"  # key of the record in a dataclass field's metadata


def _in_words(value: object) -> str:
    return "none" if value is None else str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Describes one field of a policy: how suites set it, which values it allows, and how names and tables show it.

    A policy's class declares a field by a call of :func:`setting`, which makes this record.  At that time the last
    three attributes, ``name``, ``part`` and ``kind``, are not known; :func:`settings` fills them in later.

    A declaration may leave out ``key`` and ``label``.  :func:`settings` then sets ``key`` to the field's name, such as
    ``max_live``, and ``label`` to this name with spaces in place of underscores, such as ``max live``.
    """

    # The values that a suite may give, and what the field does, in Markdown: ``kind of value: meaning``.  Empty if the
    # field has no key of its own in suites.
    says: str
    key: str = ""  # the field's key in suites, after ``policy.``; empty: the field's name
    least: int | None = None  # smallest number; None: any value of the type is allowed
    most: int | None = None  # largest number
    # Parser of the text that a suite gives; None: the text is the value.
    read: Callable[[str], Any] | None = None
    pair: bool = False  # whether a suite may give a list of two texts, one for each hop
    unset: Any = None  # value of the field if a suite does not give the key; None: the strategy's own value
    or_none: bool = False  # whether a suite may also give ``none``, which keeps the strategy's own value
    # Name of the field in names of configurations; empty: in no name, because it is part of the layout only.
    label: str | None = None  # None: the field's name
    short: str = ""  # a shorter label, for places where a value follows at once: ``w int8:64``
    in_words: Callable[[Any], str] = _in_words  # text of a value in names of configurations
    # Whether the field says how a trial is executed, not which strategy trains.  Names of configurations leave such a
    # field out if all configurations have the same value.
    execution: bool = False
    # ``alters(policy, value)``: whether a preset with this ``policy`` would become another strategy if a suite set the
    # field to ``value`` for all its strategies.  If so, the preset keeps its own value.
    alters: Callable[[Any, Any], bool] = lambda *_: False
    # Where the field has an effect: in ``training`` only, on ``links`` between nodes, or at ``stage 3``.
    scope: Scope = "all"
    # Whether a trial that sets the field to its preset's own value has the same id as a trial that does not set it.
    implied: bool = False

    name: str = ""  # the field's name
    part: str = ""  # the policy's part that has the field, such as ``memory``; empty: the policy itself
    kind: Any = None  # type of the field

    @property
    def path(self) -> str:
        """The field's name in the policy: ``stage``, or ``memory.prefetch`` for a field of the part ``memory``."""
        return f"{self.part}.{self.name}" if self.part else self.name

    @property
    def range(self) -> str:
        """The allowed numbers as text for error messages: ``1 to 8``, ``0 or more``."""
        return f"{self.least} or more" if self.most is None else f"{self.least} to {self.most}"

    def of(self, policy: object) -> Any:
        """Returns the value that the field has in ``policy``."""
        return getattr(getattr(policy, self.part) if self.part else policy, self.name)

    def parsed(self, value: Any) -> Any:
        """Converts the ``value`` that a suite gives into the field's value.

        Without a parser (``read``), the result is ``value`` itself.  With a parser:

        - A list of two texts gives a tuple of the two parsed values.
        - A single text gives its parsed value or, if the field holds a tuple, a tuple that has this value twice.
        """
        if self.read is None:
            return value
        if not isinstance(value, str):
            return tuple(map(self.read, value))
        return (self.read(value),) * 2 if get_origin(self.kind) is tuple else self.read(value)


def setting(default: _Value, says: str = "", **known: Any) -> _Value:
    """Returns a dataclass field with this ``default``, whose metadata holds a :class:`Setting` that describes it.

    ``says`` and ``known`` are the attributes of the :class:`Setting`, such as ``least=0``.
    """
    return field(default=default, metadata={_RECORD: Setting(says=says, **known)})


@functools.cache
def settings(kind: type) -> tuple[Setting, ...]:
    """Returns one :class:`Setting` for each field of ``kind``, in the order in which the fields are declared.

    ``kind`` is the class of a policy or of a part of a policy.  A part, such as ``memory``, is a field whose value is a
    dataclass with fields of its own.  The result has these inner fields, and no setting for the part as a whole.
    """
    return tuple(_settings(kind))


def _settings(kind: Any, part: str = "") -> Iterator[Setting]:
    kinds = get_type_hints(kind)
    for each in fields(kind):
        if (known := each.metadata.get(_RECORD)) is not None:
            label = each.name.replace("_", " ") if known.label is None else known.label
            place = {"name": each.name, "part": part, "kind": kinds[each.name], "key": known.key or each.name}
            yield replace(known, label=label, **place)
        elif is_dataclass(each.default):
            yield from _settings(type(each.default), each.name)


def texts(policy: object) -> dict[str, str]:
    """Returns the value of each field of ``policy`` as text; the keys are paths, such as ``memory.prefetch``."""
    values = {each: each.of(policy) for each in settings(type(policy))}  # type: ignore[arg-type]  # a class is hashable
    return {
        each.path: each.in_words(value) if isinstance(value, tuple) else str(value)
        for each, value in values.items()
    }


def difference(ranks: Sequence[Mapping[str, str]]) -> str | None:
    """Returns an error message for the first field in which the policies of ranks differ; None if all are equal.

    ``ranks[rank]`` has the values of this rank's policy, as :func:`texts` returns them.
    """
    for path in {path: None for values in ranks for path in values}:
        alike = defaultdict[str, list[int]](list)  # value -> the ranks that have it
        for rank, values in enumerate(ranks):
            alike[values.get(path, "unknown")].append(rank)
        if len(alike) > 1:
            first, *others = (f"{value} on {ranks_in_words(those)}" for value, those in alike.items())
            return (
                f"the policies of the ranks differ: {path} is {first}, but {', '.join(others)}, so that the ranks' "
                "messages may not match: give all ranks the same policy"
            )
    return None


def out_of_range(values: Any) -> Iterator[tuple[Setting, Any]]:
    """Yield (setting, number) for each field of ``values`` whose number is outside the range that its setting allows.

    ``values`` is a policy or a part of a policy.  For a policy, the fields of its parts are not checked.  NaN is
    outside every range.
    """
    for each in settings(type(values)):  # type: ignore[arg-type]  # a class is hashable
        number = None if each.part or each.least is None else each.of(values)
        if number is not None and not each.least <= number <= (math.inf if each.most is None else each.most):
            yield each, number
