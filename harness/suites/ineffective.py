"""Refuses parts of a suite that have no effect, such as settings that no trial uses.

A line without effect is nearly always a mistake.  If the suite ran in spite of the line, it would answer another
question than its author believes.  :mod:`harness.suites.contradictions` refuses contradictions inside one trial.  This
module does not import torch.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from harness.suites.answering_quantity import LEAST_STEPS, quantity
from harness.suites.labels import flatten, look_up, value_text
from harness.suites.peers import PEERS, READ_BY, Family, family_of
from harness.suites.repeat_order import configuration_of
from harness.suites.suite import SuiteError, SuiteTables
from harness.suites.trial import KEYS, MUON, Trial
from impl.policy.setting import Scope

_OF_SECONDS: Final = ("step", "rate", "nodes", "tokens")  # quantities that are computed from seconds
_LATE: Final = 0.25  # a margin in steps is measured over this last share of training


class Setting(NamedTuple):
    """A value that a suite sets, with the name of the table that sets it, such as ``[defaults]``."""

    value: Any
    table: str


Point = dict[str, Setting]
"""Settings by dotted path: a combination of values of all axes, or a part of a combination."""

# Each function returns why a trial does not use a field, as the end of a sentence that begins with "has no effect
# with".  It returns None if the trial uses the field.


def _trains(trial: Trial) -> str | None:
    return "workload = 'generate', which trains nothing" if trial.workload == "generate" else None


def _joined(trial: Trial) -> str | None:
    return "cluster.nodes = 1, which has no link" if trial.cluster.nodes == 1 else None


def _validated(trial: Trial) -> str | None:
    return "validate_every not set, so that nothing is validated" if trial.validate_every is None else None


def _with_policy(trial: Trial) -> str | None:
    return f"strategy = {trial.strategy!r}, a peer without a policy" if trial.strategy in PEERS else None


def _of_stage_3(trial: Trial) -> str | None:
    policy = trial.resolved_policy()
    if policy is None:
        return _with_policy(trial)
    return f"stage {policy.stage}, which keeps weights gathered" if policy.stage < 3 else None


def _started_by(launcher: str) -> Callable[[Trial], str | None]:
    def why(trial: Trial) -> str | None:
        other = trial.cluster.launcher
        return None if other == launcher else f"cluster.launcher = {other!r} (only {launcher!r} reads it)"

    return why


def _read_by(*families: Family) -> Callable[[Trial], str | None]:
    def why(trial: Trial) -> str | None:
        read = family_of(trial.strategy) in families
        return (
            None if read else f"strategy = {trial.strategy!r} (only peers of {', '.join(families)} read it)"
        )

    return why


_OF_POLICIES: Final[dict[Scope, Callable[[Trial], str | None]]] = {
    "all": _with_policy,
    "training": lambda trial: _with_policy(trial) or _trains(trial),
    "links": lambda trial: _with_policy(trial) or _joined(trial),
    "stage 3": _of_stage_3,
}
_WHY_UNUSED: Final[dict[str, Callable[[Trial], str | None]]] = {
    # Each key is the beginning of a path.  The first key with which a field's path begins decides, so longer keys come
    # first.
    **{f"policy.{name}": _OF_POLICIES[each.scope] for name, each in KEYS.items()},
    "policy.gradients": lambda trial: (
        _with_policy(trial)
        or _trains(trial)
        or (
            None
            if trial.own_method is None
            else f"policy.reduce = {trial.policy.reduce!r}, which uses no codecs"
        )
    ),
    "policy.weights": lambda trial: (
        _with_policy(trial)
        or (
            None
            if trial.own_gather is None
            else f"policy.gather = {trial.policy.gather!r}, which uses no codecs"
        )
    ),
    "gather_method": lambda trial: (
        None
        if trial.own_gather is not None
        else "a policy.gather that names no class of your own, such as 'mine:Class'"
    ),
    "policy.schedule": _with_policy,
    "policy.owned": lambda trial: (
        _with_policy(trial)
        or _trains(trial)
        or (
            None
            if trial.optimizer.orthogonalises
            else f"optimizer.name = {trial.optimizer.name!r} (only {MUON}'s matrices have owners)"
        )
    ),
    "method": lambda trial: (
        None
        if trial.own_method is not None or trial.own_strategy
        else "a policy.reduce and a strategy that name no class of your own, such as 'mine:Class'"
    ),
    "policy.persist_most": lambda trial: (
        None if trial.policy.persist_below else "policy.persist_below not set"
    ),
    "policy.pair_below": lambda trial: (
        _of_stage_3(trial)
        or ("policy.prefetch = 0" if trial.policy.prefetch == 0 else None)
        or (
            None
            if trial.cluster.transport == "nccl"
            else f"cluster.transport = {trial.cluster.transport!r}, since only NCCL posts two messages by one call"
        )
    ),
    **{f"peer.{name}": _read_by(*families) for name, families in READ_BY.items()},
    "peer": lambda trial: (
        None
        if trial.strategy in PEERS
        else f"strategy = {trial.strategy!r} (for policies set policy.compute)"
    ),
    "cluster.rate": _joined,
    "cluster.latency": _joined,
    "cluster.hosts": _started_by("hosts"),
    "cluster.slurm": _started_by("slurm"),
    "optimizer.schedule.start": lambda trial: (
        None if trial.optimizer.schedule.warmup else "optimizer.schedule.warmup = 0"
    ),
    "optimizer.schedule.floor": lambda trial: (
        None if trial.optimizer.schedule.decay != "none" else "optimizer.schedule.decay = 'none'"
    ),
    "optimizer": _trains,
    "validation_batches": _validated,
    "measure_quantisation": lambda trial: (
        f"strategy = {trial.strategy!r}, a peer whose messages are not measured"
        if trial.strategy in PEERS
        else None
    ),
}


def check_tables(
    file: SuiteTables, axes: Sequence[Sequence[Point]], parsed: Callable[[Point], Trial]
) -> None:
    """Refuse empty tables, and axes that list a value twice.

    Args:
        file: The suite file's tables.
        axes: For each axis, its points.  A point has the settings that one entry of the axis makes, by dotted path.
        parsed: Makes a trial from a point.  Two values of an axis are equal if their trials are equal, such as
            ``"1 Gbit/s"`` and ``"1000 Mbit/s"``.

    Raises:
        SuiteError: For the first such table or value.
    """
    roles: tuple[str, ...] = ("baseline", "contrast")
    declared: dict[str, Any] = {name: getattr(file, name) for name in roles if name in file.model_fields_set}
    declared |= {f"[[zip]] #{number}": table for number, table in enumerate(file.zip, 1)}
    declared |= {f"[[exclude]] #{number}": table for number, table in enumerate(file.exclude, 1)}
    declared |= {f"[[override]] #{number} set": rule.set for number, rule in enumerate(file.override, 1)}
    for name, table in declared.items():
        if not table:
            raise SuiteError(f"{name} = {{}}: names no field of a trial; name a field, or remove the table")
    for axis in axes:
        seen = set[str]()
        for row in axis:
            identity = parsed(row).id
            if identity in seen:
                text = ", ".join(f"{path} = {value_text(setting.value)}" for path, setting in row.items())
                table = next(iter(row.values())).table
                raise SuiteError(f"{table} {text} is listed twice: list each value once")
            seen.add(identity)


def check_members(
    written: Mapping[str, list[Any]],
    wanted: Mapping[str, list[Any]],
    name: str,
    trials: Sequence[Mapping[str, Any]],
) -> None:
    """Refuse a table such as ``[[exclude]]`` if it names a value that no trial has.

    Args:
        written: Values of the table by dotted path, as the suite file writes them, such as ``"1 Gbit/s"``.
        wanted: The same values in the form that they have in ``trials``, such as 1000.0.
        name: Name of the table, for the message.
        trials: All trials, each as JSON-ready data.

    Raises:
        SuiteError: For the first such value.
    """
    for path, values in wanted.items():
        present = [look_up(trial, path) for trial in trials]
        for text, value in zip(map(value_text, written[path]), values, strict=True):
            if value not in present:
                raise SuiteError(
                    f"{name} {path} = {text}: matches no trial of this suite; leave that value out"
                )


def check_overrides(file: SuiteTables, axes: Sequence[Sequence[Point]], points: Sequence[Point]) -> None:
    """Refuse an ``[[override]]`` without effect, and an axis that an ``[[override]]`` leaves without effect.

    An ``[[override]]`` has no effect if later overrides replace its value in every combination.  An axis has no effect
    if overrides replace all its values with the same value.

    Args:
        file: The suite file's tables.
        axes: For each axis, its points.  A point has the settings that one entry of the axis makes, by dotted path.
        points: For each combination of the axes, its settings by dotted path, after all overrides.
    """
    standing = {(setting.table, path) for point in points for path, setting in point.items()}
    for number, override in enumerate(file.override, 1):
        table = f"[[override]] #{number} set"
        for path, value in flatten(override.set):
            if (table, path) not in standing:
                later = "later [[override]] tables replace this value in every trial that this table matches"
                raise SuiteError(
                    f"{table} {path} = {value_text(value)}: {later}; remove {path} from this table"
                )
    for axis in axes:
        paths = list(dict.fromkeys(path for row in axis for path in row))
        left = {json.dumps([point[p].value for p in paths if p in point], default=str) for point in points}
        by = [
            point[p].table for point in points for p in paths if p in point and "override" in point[p].table
        ]
        if len(axis) > 1 and len(left) == 1 and by:
            table = next(iter(axis[0].values())).table
            alike = f"{by[0]} replaces all its {len(axis)} values with one"
            raise SuiteError(
                f"{table} {', '.join(paths)}: {alike}; let the override match only some of them, or remove the axis"
            )


def check_settings(given: Sequence[Point], points: Sequence[Point], trials: Sequence[Trial]) -> None:
    """Refuse a setting that has no effect in any of the trials for which a table sets it.

    Args:
        given: For each trial, all settings that the suite's tables give it, by dotted path.
        points: For each trial, the settings in ``given`` that apply to the trial's strategy.
        trials: The trials, in the order of ``given`` and ``points``.
    """
    usual = Trial().model_dump(mode="json")
    reasons: dict[tuple[str, str], list[str | None]] = defaultdict(list)
    values: dict[tuple[str, str], Any] = {}
    for settings, point, trial in zip(given, points, trials, strict=True):
        data = trial.model_dump(mode="json")
        for path, (value, table) in settings.items():
            if path not in point:
                reasons[table, path].append(_why_unused(trial, path) or f"strategy = {trial.strategy!r}")
            elif look_up(data, path) != look_up(usual, path):
                reasons[table, path].append(_why_unused(trial, path))
            else:
                continue
            values[table, path] = value
    for (table, path), why in reasons.items():
        if all(why):
            others = " (the other trials do not use it either)" if len({*why}) > 1 else ""
            text = f"{table} {path} = {value_text(values[table, path])}"
            raise SuiteError(f"{text}: has no effect with {why[0]}; change that, or remove {path}{others}")


def _why_unused(trial: Trial, path: str) -> str | None:
    """Return why a trial does not use the field at a dotted path, such as ``cluster.rate``; None if the trial uses it.

    The text is the end of a sentence that begins with "has no effect with".
    """
    for beginning, why in _WHY_UNUSED.items():
        if f"{path}.".startswith(f"{beginning}."):
            return why(trial)
    return None


def check_answer(file: SuiteTables, trials: Sequence[Trial]) -> None:
    """Refuse values of ``answer``, ``margin``, ``seconds`` and ``repeats`` that need more than the trials measure.

    These are keys at the top of a suite file.  For example, ``answer = "loss"`` needs trials that measure validation
    losses, and ``margin`` needs two validations in the last quarter of the steps.  A value of ``seconds`` that names
    the suite itself is refused too.
    """
    for reason in _unanswered(file.answer, trials):
        raise SuiteError(f'answer = "{file.answer}": {reason}, or remove answer')
    if any(not trial.measures_time for trial in trials):
        _check_untimed(file, trials)
    for trial in trials if file.margin else ():
        total, every = trial.warmup + trial.steps, trial.validate_every
        after = {*range(every or total, total, every or total), total} if every is not None else set()
        if total < LEAST_STEPS or sum(step >= (1 - _LATE) * total for step in after) < 2:
            has = f"{total} steps, {'no validation' if every is None else f'validate_every = {every}'}"
            needs = f"needs {LEAST_STEPS} steps or more, and two validations in the last quarter of them"
            raise SuiteError(
                f"margin = {file.margin}: {needs}; a trial has {has}: change steps or validate_every, or remove margin"
            )
    if file.seconds == file.name:
        raise SuiteError(
            f'seconds = "{file.seconds}": names this suite itself, whose step times are used by default: name another '
            "suite, or remove seconds"
        )
    if file.seconds and not any(map(_has_curve, trials)):
        raise SuiteError(
            f'seconds = "{file.seconds}": has no effect without several validation losses of a trial: set '
            f"validate_every so that trials of {LEAST_STEPS} steps or more are validated at least twice, or remove "
            "seconds"
        )


def _has_curve(trial: Trial) -> bool:
    """Return whether a trial trains at least :data:`LEAST_STEPS` steps, and is validated at least twice."""
    total, every = trial.warmup + trial.steps, trial.validate_every
    return trial.workload == "train" and total >= LEAST_STEPS and every is not None and 0 < every < total


def _check_untimed(file: SuiteTables, trials: Sequence[Trial]) -> None:
    """Refuse a suite that needs measured seconds although its ranks are threads, which measure none.

    Seconds are needed by answers such as ``step``, and by ``repeats = "until ..."``.
    """
    why = "cluster.ranks = 'threads' measures no seconds"
    if (found := quantity(trials, file.answer)) in _OF_SECONDS:
        given = f'answer = "{file.answer}"' if file.answer else f"the suite's answer would be {found!r}"
        others = ", ".join(f'"{name}"' for name in ("loss", "error", "bytes", "memory"))
        raise SuiteError(f"{given}: {why}; set answer to one of {others}, or cluster.ranks = 'processes'")
    if file.repeats.within is not None:
        raise SuiteError(
            f"repeats = 'until ...' needs seconds, but {why}; set repeats to a number, or cluster.ranks = 'processes'"
        )


def _unanswered(answer: str, trials: Sequence[Trial]) -> Iterator[str]:
    """Yield an error text for each reason why the trials do not measure the quantity ``answer``.

    Each text ends with the setting that would let them measure the quantity.
    """
    ours = {configuration_of(trial) for trial in trials if trial.strategy not in PEERS}
    for trial in trials if answer == "loss" else ():
        total = trial.warmup + trial.steps
        if trial.validate_every is None:
            yield "needs validation losses, and a trial takes none: set validate_every"
        if trial.validate_every == 0 and total < LEAST_STEPS:
            once = f"a trial is validated once, after {total} steps"
            yield f"{once}, and a single loss needs {LEAST_STEPS} steps or more: raise steps, or set validate_every = 1"
    if answer == "error" and not any(t.measure_quantisation and t.strategy not in PEERS for t in trials):
        yield "no trial of a policy measures errors: set measure_quantisation = true"
    if answer == "bytes" and all(trial.cluster.nodes == 1 for trial in trials):
        yield "cluster.nodes = 1 has no bytes between nodes: set 2 or more"
    if answer == "memory" and len(ours) < 2:
        yield "memory is compared between policies, and the suite has fewer than two: add one"
    if answer == "step" and all(trial.workload == "generate" for trial in trials):
        yield "workload = 'generate' has no training steps, and is reported in tokens per second: set another workload"
