"""Reads a suite file in TOML and expands it into a list of trials, interleaved by repeat.

A suite asks one question; docs/guide/suites.md says how.  Axes of ``[matrix]`` and ``[[zip]]`` multiply into
cells over ``[defaults]``; then come ``[[exclude]]`` and, in order, ``[[override]]``.

A codec, error feedback or hpZ group that [defaults] or [matrix] sets for all strategies applies only to those
that quantise there or keep a secondary shard: ZeRO-3 stays ZeRO-3.  A [[zip]] or an [[override]] that
names the strategy overrules this, and so does a suite of a single policy.  Cells that resolve to the
same run are run once.

Raises :class:`SuiteError` for everything that is known to be wrong without building the model.  No torch.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import operator
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from harness.errors import suggestion
from harness.suites import folder
from harness.suites.allowed import allowed
from harness.suites.contradictions import check, check_recipe
from harness.suites.on_failure import Answer, answers
from harness.suites.peers import PEERS
from harness.suites.question import Said
from harness.suites.repeat_order import BASELINE, Repeats, compared, roles
from harness.suites.suite import Suite
from harness.suites.trial import PeerSettings, PolicyChanges, Trial, following_model
from impl.adapters.traffic import carries
from impl.codecs.codec import Codec, CodecError, Raw, parse
from impl.deepspeed.keys import DeepSpeedError
from impl.deepspeed.keys import load as load_configuration

MOST_TRIALS: Final = 2000  # of one suite; more is a slip of the pen, not a question
NAME: Final = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
LONGEST_NAME: Final = 100
_CONFIGURATION: Final = "deepspeed_config"
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tabs and ends of lines


class SuiteError(ValueError):
    """A suite file is invalid; one line that names file, key, value and what is allowed."""


class _Override(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    match: dict[str, Any]
    set: dict[str, Any]


class _File(BaseModel):
    """The top-level keys of a suite file."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str = Field(pattern=f"^{NAME}$", max_length=LONGEST_NAME)
    question: str = Field(min_length=1)
    time: str = "not stated"
    repeats: Annotated[Repeats, BeforeValidator(Repeats.of)] = Repeats()
    on_failure: Annotated[dict[str, Answer], BeforeValidator(answers)] = {}
    baseline: dict[str, Any] = {}
    contrast: dict[str, Any] = {}
    answer: Said = ""
    margin: int = Field(0, ge=0)
    defaults: dict[str, Any] = {}
    matrix: dict[str, Any] = {}
    zip: list[dict[str, Any]] = []
    exclude: list[dict[str, Any]] = []
    override: list[_Override] = []


@dataclass(frozen=True, slots=True)
class _Setting:
    """A value, and the table of the suite file that sets it (for error messages)."""

    value: Any
    table: str


_Settings = dict[str, _Setting]  # by dotted path
_LeftOut = list[tuple[str, _Setting, str, str]]  # path, setting, why, strategy


def load(path: Path) -> Suite:
    """Read a suite file and expand it.

    Raises:
        SuiteError: for the first error in it.
    """
    text, tables = _parse(path)
    folder.find_from(path.parent)
    expansion = _Expansion(path, tables)
    return replace(expansion.suite(), file=path.name, text=text, configurations=expansion.configurations)


def name_of(path: Path) -> str:
    """The name in a suite file, which is not expanded: nothing that it names is imported.

    Raises:
        SuiteError: if it cannot be read, or has no name that a folder can have.
    """
    name = _parse(path)[1].get("name")
    if not isinstance(name, str) or len(name) > LONGEST_NAME or re.fullmatch(NAME, name) is None:
        raise SuiteError(
            f"{path}: name = {_text(name)}: expected at most {LONGEST_NAME} letters, digits, '_', '-' and "
            "'.', which is not the first"
        )
    return name


def differing(trials: Sequence[Mapping[str, Any]]) -> list[str]:
    """Dotted paths of the fields in which canonical trials differ, ``repeat`` left out, in field order."""
    flat = [dict(flatten(trial)) for trial in trials]
    paths = dict.fromkeys(itertools.chain.from_iterable(flat))
    return [path for path in paths if path != "repeat" and len({_text(one.get(path)) for one in flat}) > 1]


def look_up(trial: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path of a canonical trial; None if it has none."""
    return dict(flatten(trial)).get(path)


def _parse(path: Path) -> tuple[str, dict[str, Any]]:
    """A file's text, and its tables."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
        return text, tomllib.loads(text)
    except OSError as error:
        raise SuiteError(f"{path}: cannot read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise SuiteError(
            f"{path}: not a text file: byte {error.start} is not UTF-8; expected a suite in TOML"
        ) from None
    except (ValueError, RecursionError) as error:  # also numbers or nesting beyond Python's limits
        raise SuiteError(f"{path}: not TOML: {error}") from None


class _Expansion:
    """Expands the tables of one file into trials; holds the file's name for error messages."""

    def __init__(self, path: Path, tables: dict[str, Any]) -> None:
        self.path = path
        self.configurations: dict[str, str] = {}
        self._check_text(tables)
        self.file = self._validated(tables)
        self.fields = dict(_fields(Trial))
        self.defaults = self._settings(self._flat(self.file.defaults), "[defaults]")
        self.axes = self._axes()

    def suite(self) -> Suite:
        """Expand, exclude, override, validate, align and order."""
        total = math.prod(len(axis) for axis in self.axes) * self.file.repeats.most
        if total > MOST_TRIALS:
            self._refuse(f"{total} trials; at most {MOST_TRIALS} are allowed in one suite")
        products = itertools.product(*self.axes)
        cells = [functools.reduce(operator.or_, points, self.defaults) for points in products]
        cells = self._override(self._exclude(cells))
        if not cells:
            self._refuse("[[exclude]] leaves no trial")
        trials = self._checked(cells, check_recipe)
        left_out: _LeftOut = []
        for settings, trial in zip(cells, trials, strict=True):
            self._note_peer(settings, trial, left_out)
        asked = [self._told(settings) for settings in cells]
        if len({trial.strategy for trial in trials} - set(PEERS)) > 1:
            cells = [self._fitting(cell, trial, left_out) for cell, trial in zip(cells, trials, strict=True)]
        trials = _aligned(self.path, self._checked(cells, check))
        unique = _different(trials)
        self._check_baselines(unique)
        once = {id(trial) for trial in unique}
        return Suite(
            self.file.name,
            self.file.question,
            self.file.time,
            tuple(unique),
            self.file.repeats,
            tuple(cell for trial, cell in zip(trials, asked, strict=True) if id(trial) not in once),
            tuple(_left_out_in_words(left_out)),
            self._roles(cells, trials),
            self.file.on_failure,
            answer=self.file.answer,
            margin=self.file.margin,
        )

    def _roles(self, cells: list[_Settings], trials: list[Trial]) -> dict[str, str]:
        """The roles of trials, by id: those of ``baseline`` and, by default all others, of ``contrast``."""
        if not self.file.baseline:
            if self.file.contrast:
                self._refuse(f"contrast = {_text(self.file.contrast)}: expected a baseline beside it")
            return {}
        base = self._matcher(self.file.baseline, "baseline", cells)
        against = [not hit for hit in base]
        if self.file.contrast:
            against = self._matcher(self.file.contrast, "contrast", cells)
        try:
            return roles(trials, base, against)
        except ValueError as error:
            self._refuse(f"baseline = {_text(self.file.baseline)}: {error}")

    def _check_baselines(self, trials: Sequence[Trial]) -> None:
        """Refuse to repeat until ratios are known where there is nothing that they would be over."""
        if self.file.repeats.within is None:
            return
        for cell in compared(trials, "repeat", "seed"):
            if all(trial.strategy != BASELINE for trial in cell):
                there = ", ".join(dict.fromkeys(trial.strategy for trial in cell))
                self._refuse(
                    f"repeats: {self.file.repeats}: of ratios over {BASELINE}, which does not stand beside "
                    f"{there}; expected it there, or a number of repeats"
                )

    def _refuse(self, complaint: str) -> NoReturn:
        raise SuiteError(f"{self.path}: {complaint}")

    def _check_text(self, value: Any) -> None:
        """Refuse characters that a terminal would act on: all names and values are printed somewhere."""
        if isinstance(value, str):
            if found := _CONTROL.search(value):
                self._refuse(f"{_text(value)}: has the control character {found[0]!r}; expected text")
        elif isinstance(value, dict | list):
            for part in itertools.chain(value, value.values() if isinstance(value, dict) else ()):
                self._check_text(part)

    def _validated(self, tables: dict[str, Any]) -> _File:
        for key in tables:
            if key not in _File.model_fields:
                known = ", ".join(_File.model_fields)
                self._refuse(
                    f"unknown key {key!r}: expected one of {known}{suggestion(key, _File.model_fields)}"
                )
        try:
            return _File.model_validate(tables, strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            if first["type"] == "missing":
                self._refuse(f"key {where!r} is missing")
            self._refuse(f"{where} = {_text(first['input'])}: {allowed([first])}")

    def _flat(self, table: Mapping[str, Any]) -> dict[str, Any]:
        """A table's values by dotted path; DeepSpeed configurations, paths or tables, are their text.

        Paths are from the suite's folder.  An argument of one's own model may have the key's name.
        """
        found = dict(flatten({name: value for name, value in table.items() if name != _CONFIGURATION}))
        if _CONFIGURATION in table:
            found[_CONFIGURATION] = self._configurations(table[_CONFIGURATION])
        return found

    def _configurations(self, value: Any) -> Any:
        """Text of one configuration, or of each of a list."""
        if isinstance(value, list):
            return [self._configurations(one) for one in value]
        if isinstance(value, dict):
            return json.dumps(value, default=str)
        if not isinstance(value, str):
            return value
        try:
            found = json.dumps(load_configuration(self.path.parent / value))
        except DeepSpeedError as error:
            self._refuse(f"{_CONFIGURATION}: {error}")  # which names the file
        self.configurations[value] = found
        return found

    def _axes(self) -> list[list[_Settings]]:
        """The axes: each a list of points, a point being its fields' values; a zip is one axis."""
        axes: list[list[_Settings]] = []
        taken: list[str] = []
        for path, values in self._flat(self.file.matrix).items():
            axes.append(self._points(path, values, "[matrix]", taken))
            self._check_different(values, f"[matrix] {path}")
        for number, table in enumerate(self.file.zip, 1):
            name = f"[[zip]] #{number}"
            flat = self._flat(table)
            columns = {path: self._points(path, values, name, taken) for path, values in flat.items()}
            if len({len(points) for points in columns.values()}) > 1:
                counts = ", ".join(f"{path} has {len(points)}" for path, points in columns.items())
                self._refuse(f"{name}: {counts} values; expected equal numbers")
            self._check_different(list(zip(*flat.values(), strict=True)), name)
            axes.append([functools.reduce(operator.or_, row) for row in zip(*columns.values(), strict=True)])
        return axes

    def _check_different(self, points: list[Any], axis: str) -> None:
        seen: set[str] = set()
        for point in points:
            text = json.dumps(point, default=str)
            if text in seen:
                self._refuse(f"{axis}: {_text(point)} stands twice; expected different values")
            seen.add(text)

    def _points(self, path: str, values: Any, table: str, taken: list[str]) -> list[_Settings]:
        """The points of one axis, one per value."""
        self._kind(path, table)
        if not isinstance(values, list) or not values:
            self._refuse(f"{table} {path} = {_text(values)}: expected a list of at least one value")
        for other in taken:
            if path == other or path.startswith(other + ".") or other.startswith(path + "."):
                self._refuse(f"{table} {path}: {other!r} is an axis already; expected each field once")
        taken.append(path)
        return [self._settings({path: value}, table) for value in values]

    def _settings(self, table: dict[str, Any], name: str) -> _Settings:
        """A table's values by dotted path, every path checked."""
        settings = {}
        for path, value in flatten(table):
            if self._kind(path, name) != "leaf":
                inside = ", ".join(p for p in self.fields if p.startswith(path + ".")) or "its arguments"
                self._refuse(f"{name} {path} = {_text(value)}: expected a table ({inside})")
            settings[path] = _Setting(value, name)
        return settings

    def _kind(self, path: str, table: str) -> str:
        """The kind of the field at a path; refuses a path that names none."""
        kind = self.fields.get(path)
        if kind is None and self.fields.get(path.rpartition(".")[0]) == "open":
            kind = "leaf"
        if path == "repeat":
            self._refuse(f"{table} repeat: set by the key `repeats` at the top of the file")
        if kind is None:
            last_names = [known.rpartition(".")[2] for known in self.fields]
            near = suggestion(path, self.fields) or suggestion(path, last_names)
            if not near:
                near = f"; expected one of {', '.join(p for p, k in self.fields.items() if k != 'table')}"
            self._refuse(f"{table} {path}: no such field of a trial{near}")
        return kind

    def _trial(self, settings: _Settings) -> Trial:
        """Validate one cell into a trial, without coercing TOML's types."""
        nested: dict[str, Any] = {}
        for path, setting in settings.items():
            *tables, leaf = path.split(".")
            place = nested
            for part in tables:
                place = place.setdefault(part, {})
            place[leaf] = setting.value
        try:
            return Trial.model_validate_json(json.dumps(following_model(nested), default=str), strict=True)
        except ValidationError as error:
            errors = error.errors()
            path = _path_of(errors[0], settings)
            same = [e for e in errors if _path_of(e, settings) == path]
            setting = settings[path]
            self._refuse(f"{setting.table} {path} = {_text(setting.value)}: {allowed(same)}")

    def _fitting(self, settings: _Settings, trial: Trial, left_out: _LeftOut) -> _Settings:
        """The cell without fields that would turn its strategy into another, unless set for that strategy."""
        if trial.strategy in PEERS:
            return settings
        named = {f"[[zip]] #{n}" for n, table in enumerate(self.file.zip, 1) if "strategy" in table}
        named |= {
            f"[[override]] #{n} set" for n, one in enumerate(self.file.override, 1) if "strategy" in one.match
        }
        foreign = [path for path in _foreign(trial) if path in settings and settings[path].table not in named]
        for path in foreign:
            _, _, name = path.partition("policy.")
            able = trial.host is None or carries(trial.host, name)
            why = "it would make another strategy of" if able else "it cannot be carried out in"
            left_out.append((path, settings[path], why, trial.strategy))
        return {path: setting for path, setting in settings.items() if path not in foreign}

    @staticmethod
    def _note_peer(settings: _Settings, trial: Trial, left_out: _LeftOut) -> None:
        """Note the axes of policies on which a peer stands: it has none."""
        for path, setting in settings.items():
            if trial.strategy in PEERS and path.startswith("policy.") and setting.table == "[matrix]":
                left_out.append((path, setting, "there is no policy in", trial.strategy))

    def _told(self, settings: _Settings) -> str:
        """A cell by what the axes say of it."""
        varying = dict.fromkeys(path for axis in self.axes for point in axis for path in point)
        return ", ".join(f"{path} = {_text(settings[path].value)}" for path in varying if path in settings)

    def _checked(self, cells: list[_Settings], check: Callable[[Trial], None]) -> list[Trial]:
        """The cells' trials; refuses fields that contradict each other.

        The message names the table of the field that it begins with and, unless all cells are refused alike,
        the cell.
        """
        trials = [self._trial(settings) for settings in cells]
        for settings, trial in zip(cells, trials, strict=True):
            if (words := _complaint(check, trial)) is not None:
                table = next((f"{s.table} " for p, s in settings.items() if words.startswith(f"{p} = ")), "")
                cell = self._told(settings)
                alike = all(_complaint(check, other) == words for other in trials)
                self._refuse(f"{table}{words}" if alike or not cell else f"with {cell}: {words}")
        return trials

    def _exclude(self, cells: list[_Settings]) -> list[_Settings]:
        for number, match in enumerate(self.file.exclude, 1):
            matches = self._matcher(match, f"[[exclude]] #{number}", cells)
            cells = [cell for cell, hit in zip(cells, matches, strict=True) if not hit]
        return cells

    def _override(self, cells: list[_Settings]) -> list[_Settings]:
        for number, override in enumerate(self.file.override, 1):
            name = f"[[override]] #{number}"
            matches = self._matcher(override.match, f"{name} match", cells)
            settings = self._settings(self._flat(override.set), f"{name} set")
            cells = [cell | settings if hit else cell for cell, hit in zip(cells, matches, strict=True)]
        return cells

    def _matcher(self, match: dict[str, Any], name: str, cells: list[_Settings]) -> list[bool]:
        """Which cells a partial match hits: by value, so ``"1 Gbit/s"`` matches ``"1000 Mbit/s"``."""
        wanted = {
            path: [
                _at(self._trial(self._settings({path: choice}, name)), path)
                for choice in (value if isinstance(value, list) else [value])
            ]
            for path, value in self._flat(match).items()
        }
        trials = [self._trial(cell) for cell in cells]
        hits = [all(_at(trial, path) in values for path, values in wanted.items()) for trial in trials]
        if not any(hits):
            self._refuse(f"{name} = {_text(match)}: matches no trial of this suite")
        return hits


def flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of every value that is not a table."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted path, kind) of every field that a suite may set: leaf, table, or open (free keys)."""
    for name, known in model.model_fields.items():
        path, annotation = f"{prefix}{name}", known.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield path, "table"
            yield from _fields(annotation, f"{path}.")
        elif get_origin(annotation) is dict:
            yield path, "open"
        elif path != "repeat":
            yield path, "leaf"


def _at(trial: Trial, path: str) -> Any:
    """Value of a trial at a dotted path, also where its canonical form leaves it out."""
    return look_up(trial.model_dump(mode="json"), path)


def _path_of(error: ErrorDetails, settings: _Settings) -> str:
    """The longest prefix of an error's location that the suite set."""
    parts = [str(part) for part in error["loc"]]
    paths = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((path for path in paths if path in settings), next(iter(settings)))


def _text(value: Any) -> str:
    """A value as it stands in a suite, shortened to one readable line."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _complaint(check: Callable[[Trial], None], trial: Trial) -> str | None:
    """What a check says against a trial; None for nothing."""
    try:
        check(trial)
    except ValueError as error:
        return str(error)
    return None


def _left_out_in_words(left_out: _LeftOut) -> Iterator[str]:
    """One line for each field and table."""
    for path, table in dict.fromkeys((path, setting.table) for path, setting, *_ in left_out):
        same = [one for one in left_out if (one[0], one[1].table) == (path, table)]
        values = ", ".join(dict.fromkeys(_text(setting.value) for _, setting, *_ in same))
        whose: dict[str, dict[str, None]] = {}
        for *_, why, strategy in same:
            whose.setdefault(why, {})[strategy] = None
        names = ", ".join(dict.fromkeys(itertools.chain.from_iterable(whose.values())))
        reasons = "; ".join(f"{why} {', '.join(named)}" for why, named in whose.items())
        yield f"{path} ({values} of {table}) is left out of {names}: {reasons}"


def _foreign(trial: Trial) -> Iterator[str]:
    """Paths of policy changes that would turn the trial's preset into another technique."""
    base, changes = trial.base_policy(), trial.policy
    if base is None:
        return
    if trial.host is not None:
        yield from (f"policy.{name}" for name in trial.changes if not carries(trial.host, name))
    for path, ours, asked in (
        ("policy.weights", (base.weights,), changes.weights),
        ("policy.gradients", base.gradients, changes.gradients),
    ):
        given = [parse(text) for text in ((asked,) if isinstance(asked, str) else asked or ())]
        if given and _raw(ours) and (trial.strategy.endswith("exact") or not _raw(given)):
            yield path
    for name, foreign in (
        ("secondary", changes.secondary and not base.secondary),
        ("secondary_format", changes.secondary_format and not base.secondary),
        ("differences", changes.differences not in (None, "none") and base.differences is None),
        ("refresh", changes.refresh and base.differences is None),
        ("stage", changes.stage not in (None, base.stage)),
        ("group", changes.group and not base.group),
        ("reduce_every", changes.reduce_every == "micro_batch" and base.stage < 2),
        ("sums", changes.sums == "fp16" and _raw(base.gradients)),
        ("blocks", changes.blocks == "shape" and _raw((base.weights, *base.gradients))),
        ("planes", changes.planes == 2 and _raw((base.weights,))),
        ("feedback", changes.feedback not in (None, "none") and _raw(base.gradients)),
        ("budget", changes.budget not in (None, "none") and _raw([base.weights, *base.gradients])),
        ("gather", base.gather == "flat" and changes.gather not in (None, base.gather)),
        ("reduce", base.reduce == "ring" and changes.reduce not in (None, base.reduce)),
        ("chunks", base.reduce == "ring" and (changes.chunks or 1) > 1),
    ):
        if foreign:
            yield f"policy.{name}"


def _raw(codecs: Sequence[Codec]) -> bool:
    return all(isinstance(codec, Raw) for codec in codecs)


def _different(trials: Sequence[Trial]) -> list[Trial]:
    """The trials without duplicates that resolve to the same run; the one with fewest changes stays."""
    found: dict[str, Trial] = {}
    for trial in trials:
        key = _run_key(trial)
        found[key] = min((found.get(key, trial), trial), key=lambda one: len(one.changes))
    return list(found.values())


def _run_key(trial: Trial) -> str:
    """A key that is equal for trials that resolve to the same run, whatever their policy is called."""
    data = trial.canonical()
    policy = trial.resolved_policy()
    if policy is not None:
        topology = trial.topology()
        group = policy.group_ranks(topology)
        alike = replace(
            policy,
            secondary=policy.secondary_ranks(topology),
            secondary_format="frames"
            if policy.kept in (policy.weights, policy.inside)
            else policy.secondary_format,
            group=group if policy.stage > 0 and group < topology.world else 0,
            reduce_every="micro_batch" if policy.reduces_each_micro_batch else "step",
        )
        data["policy"] = repr(alike)
        data["strategy"] = trial.host
        data.pop(_CONFIGURATION, None)
    return json.dumps(data, sort_keys=True)


def _aligned(path: Path, trials: list[Trial]) -> list[Trial]:
    """The trials with one common alignment, that of all policies, so that bytes compare on one geometry.

    A peer's are without policy fields, and policies are without peers', so that cells do not differ by them.
    """
    policies = [policy for trial in trials if (policy := trial.resolved_policy())]
    try:
        grain = math.lcm(1, *(policy.grain for policy in policies))
    except CodecError as error:  # of a user's own, of which nothing was asked before
        raise SuiteError(f"{path}: {error}") from None
    return [
        trial.model_copy(
            update={"policy": PolicyChanges()}
            if trial.strategy in PEERS
            else {"policy": trial.policy.model_copy(update={"align": grain}), "peer": PeerSettings()}
        )
        for trial in trials
    ]
