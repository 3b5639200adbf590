"""Expands the tables of a suite file into trials.

:func:`expand` works in this order (docs/guide/suites.md describes it for users):

1. Every combination of the values of the axes in ``[matrix]`` and ``[[zip]]`` is made.  The values of a combination
   replace the values of ``[defaults]``.
2. ``[[exclude]]`` removes the combinations that it matches.  ``[[override]]`` then changes the combinations that it
   matches, in file order.
3. Policy fields that would turn a combination's strategy into another strategy are dropped from the combination.  For
   example, ``zero3`` with quantised weights would no longer be ``zero3``.  Such a field is kept in two cases: a
   ``[[zip]]`` or ``[[override]]`` that names the strategy sets it, or the suite has only one policy.
4. Each combination becomes a :class:`~harness.suites.trial.Trial`, which is checked.
5. All policies get one common alignment (parameters and shards start on a multiple of so many elements).  Combinations
   that would run exactly alike are merged.  Each trial gets its role in the comparison: baseline or contrast.

Before step 4, a combination is a ``Point``: a dict from the dotted path of a field, such as ``cluster.nodes``, to the
field's value and the name of the table that set it.  Error messages name this table.  This module does not import
torch.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from harness.errors import suggestion
from harness.suites.contradictions import check
from harness.suites.ineffective import (
    Point,
    Setting,
    check_answer,
    check_members,
    check_overrides,
    check_settings,
    check_tables,
)  # fmt: skip
from harness.suites.labels import at, counted, flatten, look_up, value_text, varying_paths
from harness.suites.peers import PEERS
from harness.suites.policy_scope import unfitting_changes
from harness.suites.repeat_order import (
    BASELINE,
    CONFIGURATION,
    TRAINING,
    Repeats,
    comparable_groups,
    compared_also,
    is_baseline,
    nearest_baselines,
    setting_of,
)  # fmt: skip
from harness.suites.suite import Suite, SuiteError, SuiteKeys, SuiteTables
from harness.suites.trial import PeerSettings, PolicyChanges, Trial, configuration_text, following_model
from impl.codecs.codec import CodecError

MOST_TRIALS: Final = 2000  # largest number of trials of a suite; more are taken for a mistake in its axes
MOST_AXES: Final = 100  # largest number of fields of [matrix] and [[zip]] together
_CONFIGURATION: Final = "deepspeed_config"


def expand(file: SuiteTables, align: int | None = None) -> Suite:
    """Expand a suite file's tables into a suite.

    Args:
        file: The tables.
        align: The alignment of all policies, in elements: every parameter and every shard starts on a multiple of it.
            With None, the alignment is the least common multiple of the block sizes of all codecs in the suite.

    Raises:
        SuiteError: For the first mistake, with one line that names the table, the key and the way out.
    """
    axes = _axes(file)
    total = math.prod(len(axis) for axis in axes) * file.repeats.most
    if total > MOST_TRIALS:
        raise SuiteError(
            f"{total} trials, but a suite has at most {MOST_TRIALS}: shorten an axis, or lower repeats"
        )
    check_tables(file, axes, _trial)
    defaults = _settings(file.defaults, "[defaults]")
    points = [functools.reduce(operator.or_, values, defaults) for values in itertools.product(*axes)]
    for number, match in enumerate(file.exclude, 1):
        hits = _hits(match, f"[[exclude]] #{number}", points)
        points = [point for point, hit in zip(points, hits, strict=True) if not hit]
    for number, override in enumerate(file.override, 1):
        hits = _hits(override.match, f"[[override]] #{number} match", points)
        settings = _settings(override.set, f"[[override]] #{number} set")
        points = [point | settings if hit else point for point, hit in zip(points, hits, strict=True)]
    if not points:
        raise SuiteError("[[exclude]] leaves no trial: let it match fewer combinations")
    check_overrides(file, axes, points)
    paths = dict.fromkeys(path for axis in axes for values in axis for path in values)
    texts = [
        ", ".join(f"{p} = {value_text(point[p].value)}" for p in paths if p in point) for point in points
    ]
    given = points
    points, left_out = _fitting(points, file)
    trials = [_trial(point) for point in points]
    for point, trial, text in zip(points, trials, texts, strict=True):
        try:
            check(trial)
        except ValueError as error:  # its message begins with the path of a field
            tables = [
                f"{table} " for path, (_, table) in point.items() if str(error).startswith(f"{path} = ")
            ]
            raise SuiteError(f"{f'with {text}: ' if text else ''}{''.join(tables[:1])}{error}") from None
    check_settings(given, points, trials)
    trials = _aligned(trials, align)
    runs = _runs(trials)
    unique = list({trial.id: trial for trial in runs}.values())
    check_answer(file, unique)
    roles, also = _roles(file, points, runs)
    _check_baselines(file.repeats, unique, roles, also)
    return Suite.model_construct(
        **{name: getattr(file, name) for name in SuiteKeys.model_fields},
        combinations=tuple(unique),
        merged=tuple(text for trial, run, text in zip(trials, runs, texts, strict=True) if trial is not run),
        left_out=tuple(left_out),
        ids_known=align is not None or all(map(_readable, trials)),
        roles=roles,
        compared_also=also,
        configurations=_configurations(file),
    )


def _configurations(file: SuiteTables) -> dict[str, str]:
    """Read the files with DeepSpeed configurations that a suite names.

    Returns:
        A dict from each file's path, as it is written in the suite file, to the configuration as JSON text.
    """
    overrides = (table for override in file.override for table in (override.match, override.set))
    tables = (file.defaults, file.matrix, *file.zip, *file.exclude, *overrides, file.baseline, file.contrast)
    values = [table.get(_CONFIGURATION) for table in tables]
    paths = itertools.chain.from_iterable(value if isinstance(value, list) else [value] for value in values)
    return {path: configuration_text(path) for path in paths if isinstance(path, str)}


def _axes(file: SuiteTables) -> list[list[Point]]:
    """Return the axes that ``[matrix]`` and ``[[zip]]`` span, each as a list of the points on the axis.

    A point sets fields of a trial: it is a dict from a field's dotted path, such as ``cluster.nodes``, to the field's
    value and the name of the table.  Each field of ``[matrix]`` is an axis of its own, and a point sets this field.
    Each ``[[zip]]`` is one axis, and a point sets all fields of the ``[[zip]]``.

    Raises:
        SuiteError: If a field has no list of values or is listed twice, if the lists of a ``[[zip]]`` differ in length,
            or if there are too many fields.
    """
    tables = [({path: values}, "[matrix]") for path, values in flatten(file.matrix)]
    tables += [(dict(flatten(table)), f"[[zip]] #{number}") for number, table in enumerate(file.zip, 1)]
    if sum(len(columns) for columns, _ in tables) > MOST_AXES:
        raise SuiteError(
            f"[matrix] and [[zip]] have more than {MOST_AXES} fields: move fields that have one value to [defaults]"
        )
    axes: list[list[Point]] = []
    taken: list[str] = []
    for columns, table in tables:
        for path, values in columns.items():
            if not isinstance(values, list) or not values:
                raise SuiteError(
                    f"{table} {path} = {value_text(values)}: expected a list of at least one value"
                )
            for other in taken:
                if f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}."):
                    raise SuiteError(f"{table} {path}: {other!r} is an axis already; list each field once")
            taken.append(path)
        if len({len(values) for values in columns.values()}) > 1:
            counts = ", ".join(f"{path} has {len(values)}" for path, values in columns.items())
            raise SuiteError(f"{table}: {counts} values; list equally many values for each field")
        rows = zip(*columns.values(), strict=True)
        axes.append([_settings(dict(zip(columns, row, strict=True)), table) for row in rows])
    return axes


def _settings(table: dict[str, Any], name: str) -> Point:
    """Return the values of one table of the suite file, each with the table's name.

    Args:
        table: The table, which may contain tables.
        name: The table's name, such as ``[defaults]``.

    Returns:
        A dict from a value's dotted path, such as ``cluster.nodes``, to the value and the table's name.

    Raises:
        SuiteError: If the table sets the field ``repeat``.
    """
    settings = {path: Setting(value, name) for path, value in flatten(table)}
    if "repeat" in settings:
        raise SuiteError(f"{name} repeat: cannot be set; use the key `repeats` at the top of the file")
    return settings


def _trial(point: Point) -> Trial:
    """Make a trial from a point: a dict of the trial's field values by dotted path, such as ``cluster.nodes``.

    Raises:
        SuiteError: If a field does not exist, or if a value is invalid.  Values are not converted to the type of their
            field: ``steps = "8"`` is invalid.
    """
    nested: dict[str, Any] = {}
    for path, (value, table) in point.items():
        *tables, leaf = path.split(".")
        place = nested
        for part in tables:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise SuiteError(f"{table} {path}: {part!r} is set to a value; expected a table")
        place[leaf] = value
    try:
        return Trial.model_validate_json(json.dumps(following_model(nested), default=str), strict=True)
    except ValidationError as invalid:
        errors = invalid.errors()
        path = _path_of(errors[0], point)
        value, table = point[path]
        if errors[0]["type"] == "extra_forbidden":
            known = field_paths(Trial)
            near = suggestion(path, known) or suggestion(path, [name.rpartition(".")[2] for name in known])
            near = near or f"; expected one of {', '.join(known)}"
            raise SuiteError(f"{table} {path}: no such field of a trial{near}") from None
        field = ".".join(map(str, errors[0]["loc"]))
        if errors[0]["type"] in ("list_type", "tuple_type") and path.startswith(f"{field}."):
            raise SuiteError(f"{table} {field}: is a table; expected a list: {field} = [...]") from None
        expected = expected_text([error for error in errors if _path_of(error, point) == path])
        raise SuiteError(f"{table} {path} = {value_text(value)}: {expected}") from None


def field_paths(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Return the dotted paths, such as ``cluster.nodes``, of all fields of ``model`` that a suite may set.

    ``model`` is :class:`Trial`, or the class of one of its parts.  Every path begins with ``prefix``, the path of this
    part: ``cluster.`` for the class ``Cluster``.
    """
    paths: list[str] = []
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            paths += field_paths(field.annotation, f"{prefix}{name}.")
        elif name != "repeat":
            paths.append(f"{prefix}{name}")
    return paths


def _path_of(error: ErrorDetails, point: Point) -> str:
    """Return the dotted path of the value in ``point`` that caused an error of pydantic.

    ``point`` has the values of a trial's fields by dotted path, such as ``cluster.nodes``.  pydantic gives the location
    of an error, which need not be a path of ``point``.  This function shortens the location from its end until a path
    equals the location or lies inside it, and returns the first such path:

    - The location ``policy.weights.0`` gives the path ``policy.weights``.
    - The location ``cluster`` gives the first path that begins with ``cluster.``, such as ``cluster.nodes``.

    If no path fits, the first path of ``point`` is returned.
    """
    parts = [str(part) for part in error["loc"]]
    for length in range(len(parts), 0, -1):
        where = ".".join(parts[:length])
        if paths := [path for path in point if f"{path}.".startswith(f"{where}.")]:
            return paths[0]
    return next(iter(point))


def _hits(match: dict[str, Any], name: str, points: list[Point]) -> list[bool]:
    """Find the trials that a table such as ``[[exclude]]`` matches.

    Args:
        match: The table, which gives fields a value or a list of values.  A trial matches if each of these fields has
            the given value, or one of the values in the list.  Values are parsed first, so that ``"1 Gbit/s"`` matches
            ``"1000 Mbit/s"``.
        name: The table's name, for error messages.
        points: The trials, each as its values by dotted path.

    Returns:
        For each trial, whether the table matches it.

    Raises:
        SuiteError: If the table matches no trial, or if it names a value that no trial has.
    """
    written, wanted = dict[str, list[Any]](), dict[str, list[Any]]()
    for path, value in flatten(match):
        choices = value if isinstance(value, list) else [value]
        matching = [_trial(_settings({path: choice}, name)).model_dump(mode="json") for choice in choices]
        written[path] = choices
        wanted[path] = [look_up(trial, path) for trial in matching]
    trials = [_trial(point).model_dump(mode="json") for point in points]
    hits = [all(look_up(trial, path) in values for path, values in wanted.items()) for trial in trials]
    if not any(hits):
        raise SuiteError(
            f"{name} = {value_text(match)}: matches no trial of this suite; correct or remove it"
        )
    check_members(written, wanted, name, trials)
    return hits


def _fitting(points: list[Point], file: SuiteTables) -> tuple[list[Point], list[str]]:
    """Drop policy fields that do not fit a trial's strategy, such as quantised weights for ``zero3``.

    Args:
        points: The trials, each as its values by dotted path.
        file: The suite file's tables.

    Returns:
        The trials without these fields, and a list of lines for the user.  Each line names one field that was dropped,
        the strategies from whose trials it was dropped, and the reason.
    """
    named = {f"[[zip]] #{n}" for n, table in enumerate(file.zip, 1) if "strategy" in table}
    named |= {f"[[override]] #{n} set" for n, rule in enumerate(file.override, 1) if "strategy" in rule.match}
    trials = [_trial(point) for point in points]
    several = len({trial.strategy for trial in trials} - set(PEERS)) > 1
    left_out: dict[tuple[str, str, str], list[tuple[str, str]]] = defaultdict(list)
    fitting = [dict(point) for point in points]
    for point, trial in zip(fitting, trials, strict=True):
        reasons = unfitting_changes(trial) if several else {}
        for path, (value, table) in list(point.items()):
            why = "" if table in named else reasons.get(path, "")
            if trial.strategy in PEERS and path.startswith("policy.") and table == "[matrix]":
                why = "there is no policy in"  # policy fields of other tables are dropped without a line
            if why:
                left_out[path, table, why].append((value_text(value), trial.strategy))
                del point[path]
    lines = []
    for (path, table, why), pairs in left_out.items():
        values, names = (", ".join(dict.fromkeys(column)) for column in zip(*pairs, strict=True))
        lines.append(f"{path} ({values} of {table}) is left out of {names}: {why} {names}")
    return fitting, lines


def _readable(trial: Trial) -> bool:
    """Return whether the block sizes of all codecs of a trial are known to this process.

    The block size of a user's codec is known only after the user's module is imported, and some commands of ``zeropp``
    import no such modules.
    """
    policy = trial.resolved_policy()
    return policy is None or policy.readable


def _aligned(trials: list[Trial], align: int | None) -> list[Trial]:
    """Return copies of the trials with one common alignment, and with defaults in the fields that a trial does not use.

    Unused fields get their defaults so that they do not change the trial's id.  These fields are

    - for a peer: ``policy``, and the ``peer`` fields that the peer's library does not read;
    - for other trials: all ``peer`` fields;
    - ``method`` and ``gather_method``, if the trial names no class of the user's own.

    Args:
        trials: The trials.
        align: The alignment in elements: every parameter and every shard starts on a multiple of it.  With None, it is
            the least common multiple of the block sizes of all policies, except policies with a codec whose block size
            is not known (:func:`_readable`).
    """
    try:
        policies = [trial.resolved_policy() for trial in trials if _readable(trial)]
        grain = align or math.lcm(1, *(policy.grain for policy in policies if policy))
    except CodecError as error:  # a user's own codec is called here for the first time
        raise SuiteError(str(error)) from None
    return [
        trial.model_copy(
            update={
                "policy": PolicyChanges(),
                "method": {},
                "gather_method": {},
                "peer": trial.peer.read_by(PEERS[trial.strategy].family),
            }
            if trial.strategy in PEERS
            else {
                "policy": trial.policy.model_copy(update={"align": grain}),
                "method": {} if trial.own_method is None and not trial.own_strategy else trial.method,
                "gather_method": {} if trial.own_gather is None else trial.gather_method,
                "peer": PeerSettings(),
            }
        )
        for trial in trials
    ]


def _runs(trials: Sequence[Trial]) -> list[Trial]:
    """Find groups of trials that would run exactly alike, and choose one trial of each group to run.

    The chosen trial is the one that changes the fewest policy fields of its strategy.

    Returns:
        For each trial, the trial that runs in its place.  For most trials this is the trial itself.
    """
    kept: dict[str, Trial] = {}
    keys = [_run_key(trial) for trial in trials]
    for key, trial in zip(keys, trials, strict=True):
        kept[key] = min((kept.get(key, trial), trial), key=lambda candidate: len(candidate.changes))
    return [kept[key] for key in keys]


def _run_key(trial: Trial) -> str:
    """Return a text that is equal for two trials if both would run exactly the same.

    Two trials may run the same although their strategies differ.  For example, the changes that one trial makes to its
    policy may give the policy of the other trial.
    """
    data = trial.canonical()
    policy = trial.resolved_policy()
    if policy is not None:
        topology = trial.topology()
        group = policy.group_ranks(topology)
        frames = policy.copy_codec in (policy.weights, policy.inside)
        data["policy"] = repr(
            replace(
                policy,
                secondary=policy.secondary_ranks(topology),
                secondary_format="frames" if frames else policy.secondary_format,
                group=group if policy.stage > 0 and group < topology.world else 0,
                reduce_every="micro_batch" if policy.reduces_each_micro_batch else "step",
            )
        )
        data["strategy"] = trial.strategy if trial.own_strategy else trial.host
        data.pop(_CONFIGURATION, None)
    return json.dumps(data, sort_keys=True)


def _check_baselines(
    repeats: Repeats, trials: Sequence[Trial], roles: dict[str, str], also: Sequence[str]
) -> None:
    """Refuse ``repeats = "until ..."`` if some trials have no baseline.

    With ``until``, trials are repeated until their speed-ups over the baseline are known precisely enough, so that each
    trial needs a baseline.  A trial and its baseline may differ only in these fields:

    - ``seed`` and ``repeat``;
    - the configuration, that is, strategy, policy and the other fields of
      :data:`~harness.suites.repeat_order.CONFIGURATION`;
    - the fields ``also``.

    Args:
        repeats: The suite's key ``repeats``.
        trials: All trials of the suite.
        roles: ``baseline`` or ``contrast`` by the id of a trial; empty if the suite names no baseline.
        also: Further fields that belong to the configuration in this suite.

    Raises:
        SuiteError: If ``repeats`` is ``until ...``, and some trials have no baseline.
    """
    if repeats.within is None:
        return
    named = BASELINE if not roles else "the suite's baseline"
    for setting in comparable_groups(trials, "repeat", "seed", *also):
        if not any(is_baseline(trial, roles) for trial in setting):
            present = ", ".join(dict.fromkeys(trial.strategy for trial in setting))
            why = f"compares each trial with {named}, but no trial of {named} has the setting of {present}"
            raise SuiteError(
                f'repeats = "until ..." {why} (the same cluster, model, batch and so on); add a trial of {named} with '
                "this setting, or set repeats to a number"
            )


def _roles(
    file: SuiteTables, points: list[Point], runs: list[Trial]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Determine which trials are the baseline and which are compared with it, from the suite's keys.

    The key ``baseline`` matches the baseline.  The key ``contrast`` matches the trials that are compared with it;
    without this key, these are all other trials.  A trial that runs for several combinations is the baseline if
    ``baseline`` matches one of them.

    Args:
        file: The suite file's tables.
        points: All combinations.
        runs: For each combination, the trial that runs for it.

    Returns:
        (roles, also).  ``roles`` maps the id of each trial with a role to ``baseline`` or ``contrast``; it is empty
        without the key ``baseline``.  ``also`` names the training fields, such as ``optimizer``, in which trials may
        differ from their baseline in this suite (:func:`~harness.suites.repeat_order.compared_also`).

    Raises:
        SuiteError: In these cases:

            - ``contrast`` is set without ``baseline``;
            - a key matches no trial, or names a value that no trial has;
            - both keys match the same trial;
            - a trial is left without another trial to compare it with;
            - a setting has several baselines, and :func:`_check_nearest` refuses them.
    """
    if not file.baseline:
        if file.contrast:
            raise SuiteError(
                f"contrast = {value_text(file.contrast)}: needs a baseline; name one, or remove contrast"
            )
        return {}, ()
    key = f"baseline = {value_text(file.baseline)}"
    base = _hits(file.baseline, "baseline", points)
    against = _hits(file.contrast, "contrast", points) if file.contrast else [not hit for hit in base]
    if both := sum(map(operator.and_, base, against)):
        raise SuiteError(
            f"{key}: baseline and contrast both match {counted(both, 'trial')}; let them match different trials"
        )
    bases = {trial.id: trial for trial, hit in zip(runs, base, strict=True) if hit}
    others = {trial.id: trial for trial, hit in zip(runs, against, strict=True) if hit}
    if file.contrast and (same := bases.keys() & others.keys()):
        run = f"the same run as a trial of the contrast (both run as {bases[min(same)].strategy})"
        raise SuiteError(f"{key}: the baseline is {run}; let baseline and contrast match different runs")
    others = {name: trial for name, trial in others.items() if name not in bases}
    if not others:
        raise SuiteError(
            f"{key}: every trial is the baseline, so no trial is left to compare; let baseline match fewer trials"
        )
    also = compared_also([*bases.values()], [*others.values()])
    settings = [setting_of(trial, *also) for trial in bases.values()]
    if len({*settings}) < len(settings):
        _check_nearest(key, file, [*bases.values()], [*others.values()], also)
    alone = [trial for trial in others.values() if setting_of(trial, *also) not in settings]
    if alone:
        raise SuiteError(f"{key}: {_without_baseline(alone, [*bases.values()], len(others))}")
    without = {*settings} - {setting_of(trial, *also) for trial in others.values()}
    if without:
        lone = next(trial for trial in bases.values() if setting_of(trial, *also) in without)
        where = _difference(lone, [*others.values()])
        raise SuiteError(
            f"{key}: some baseline trials have {where}, and no trial of the contrast does: add a trial with these "
            "values to the contrast, or let baseline match fewer trials"
        )
    return dict.fromkeys(others, "contrast") | dict.fromkeys(bases, "baseline"), also


def _check_nearest(
    key: str, file: SuiteTables, bases: Sequence[Trial], others: Sequence[Trial], also: Sequence[str]
) -> None:
    """Raise a SuiteError if a trial has several baselines, and it is not clear which of them it is compared with.

    A setting (the same cluster, model, batch and so on) may have several baselines.  Each trial of the setting is
    compared with the nearest baseline, which differs from the trial in the fewest fields.

    Args:
        key: The suite's key ``baseline`` with its value, for the message.
        file: The suite file's tables.
        bases: All baselines.
        others: All trials that are compared with a baseline.
        also: Further fields that belong to the configuration in this suite, in addition to strategy, policy and so on.

    Raises:
        SuiteError: If two baselines are equally near to a trial, or if the suite has ``repeats = "until ..."``, which
            allows only one baseline in a setting.
    """
    several = f"{key}: matches several configurations of one setting"
    if file.repeats.within is not None:
        until = f"until {100 * file.repeats.within:g} %"
        raise SuiteError(
            f'{several}, which repeats = "{until}" does not allow; let baseline match one configuration of each '
            "setting, or set repeats to a number"
        )
    for trial in others:
        here = [base for base in bases if setting_of(base, *also) == setting_of(trial, *also)]
        if len(nearest_baselines(trial, here)) > 1:
            where = _difference(trial, [other for other in others if other is not trial] or bases)
            raise SuiteError(
                f"{several}, and a trial of {trial.strategy}{f' with {where}' if where else ''} differs from two of "
                "them in equally many fields; let baseline match only one of them, or name a contrast"
            )


def _without_baseline(alone: Sequence[Trial], bases: Sequence[Trial], total: int) -> str:
    """Return the end of an error message about trials that have no baseline to be compared with.

    Args:
        alone: The trials without a baseline in their setting (the same cluster, model, batch and so on).
        bases: All baselines.
        total: Number of all trials that should be compared with a baseline.
    """
    where = _difference(alone[0], bases)
    count = f"matches no trial in the setting of {len(alone)} of {total} other trials, the first with {where}"
    fields = ", ".join((*CONFIGURATION, *TRAINING))
    allowed = f"a baseline may differ from other trials only in {fields}"
    return f"{count}; {allowed}: let baseline match only these fields, or name a contrast"


def _difference(trial: Trial, others: Sequence[Trial]) -> str:
    """Return, as text, the fields in which ``trial`` differs from the most similar trial in ``others``.

    The text has the values of ``trial``, such as ``cluster.nodes = 2, seed = 1``.  Strategy, policy and the other
    fields of the configuration are not compared.
    """
    mine, found = trial.canonical(), list[list[str]]()
    for other in others:
        # These are also the fields that one of the two trials leaves at their default.
        paths = varying_paths([mine, other.canonical()])
        found.append([path for path in paths if path.split(".")[0] not in CONFIGURATION])
    return ", ".join(f"{path} = {at(mine, path)}" for path in min(found, key=len))


def expected_text(errors: Sequence[ErrorDetails]) -> str:
    """Return a text that says what a field accepts, such as ``expected 'cpu' or 'cuda'``.

    ``errors`` are pydantic's errors about one value; a field that accepts several types has an error for each type.
    """
    alternatives = []
    for error in errors:
        message = error["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
        message = "expected a list of two" if error["type"] == "missing" else message
        near = ""
        if error["type"] == "literal_error":  # pydantic's text is like: 'a', 'b' or 'c'
            near = suggestion(str(error["input"]), error["ctx"]["expected"].split("'")[1::2])
        alternatives.append(f"{message[0].lower()}{message[1:]}{near}")
    return " or ".join(dict.fromkeys(alternatives))
