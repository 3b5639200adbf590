"""Seconds of steps and of phases, tokens per second, and the speed-ups that follow from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from docs.numbers.estimate import Estimate, alone, form_of
from docs.numbers.records import derived, in_setting, paired, trials_of
from harness.records.confidence_intervals import mean_interval
from report.data import decoding, speedups
from report.data.configuration import BASELINE, NAMES, PROPOSED, is_preset
from report.data.text import number
from report.tables import phases


def speedup(suite: str, name: str, over: str = "", at: str = "") -> Estimate:
    """Return how many times as fast a step of ``name`` is as a step of ``over``, by default the suite's baseline."""
    pairs, base = paired(suite, name, over, at)
    what = f"the speed-up of {name} over {base} in {suite}"
    return Estimate(speedups.speedup(pairs), form_of(".2f"), what, 1.0, expected=speedups.expected(pairs))


def seconds(suite: str, name: str, at: str = "") -> Estimate:
    """Return the seconds of a step, as geometric mean over trials."""
    rows = trials_of(suite, name, at)
    return Estimate(speedups.step_interval(rows), number(3), f"the step of {name} in {suite}")


def exposed(suite: str, name: str, at: str = "") -> Estimate:
    """Return the seconds of a step in which a rank waits for messages, as median over undisturbed trials.

    If all trials are disturbed, all count.
    """
    rows = speedups.undisturbed(trials_of(suite, name, at))
    value = alone(float(rows["exposed_seconds"].median()), disturbed=bool(rows["disturbed"].any()))
    return Estimate(value, number(3), f"{name}'s exposed communication in {suite}")


def computing(suite: str, at: str = "") -> Estimate:
    """Return the seconds that the computation of a step takes by itself, as median over trials in matching settings."""
    value = float(in_setting(derived(suite).trials, at)["compute_seconds"].median())
    return Estimate(alone(value), form_of(".2f"), f"computing alone in {suite}")


def tokens_per_second(suite: str, name: str, at: str = "") -> Estimate:
    """Return the tokens per second of all ranks in training, as geometric mean over trials."""
    rows = speedups.step_interval(trials_of(suite, name, at), "tokens_per_second")
    return Estimate(rows, number(3), f"the tokens/s of {name} in {suite}")


def ratio_of_tokens(suite: str, name: str, at: str, over_at: str) -> Estimate:
    """Return the tokens per second of a configuration in one setting, divided by those in another setting.

    The ratio has no interval.
    """
    return tokens_per_second(suite, name, at) / tokens_per_second(suite, name, over_at)


def decoding_speedup(suite: str, name: str, at: str = "") -> Estimate:
    """Return how many times the baseline's tokens per second a configuration decodes (workload ``generate``)."""
    rows = trials_of(suite, name, at, derived(suite).generations)
    return Estimate(decoding.speedup(rows), form_of(".2f"), f"{name}'s decoding in {suite}", equal=1.0)


def phase_speedup(suite: str, name: str, phase: str, at: str = "") -> Estimate:
    """Return how many times as fast as the baseline's a phase of workload ``rlhf`` is.

    The phases are ``generate``, ``score`` and ``train``.
    """
    rows = phases.by_phase(derived(suite))
    rows = trials_of(suite, name, at, rows[rows["phase"] == phase]).dropna(subset=["baseline_seconds"])
    ratio = phases.over_baseline(rows)
    return Estimate(ratio, form_of(".2f"), f"{name}'s speed-up in phase {phase} of {suite}", equal=1.0)


def _undisturbed_pairs(suite: str, name: str, over: str, at: str) -> pd.DataFrame:
    return speedups.undisturbed(paired(suite, name, over, at)[0])


def pair_range(suite: str, name: str, over: str = "", at: str = "") -> str:
    """Return the lowest and the highest speed-up of an undisturbed pair; it replaces an interval if pairs are few."""
    pairs = _undisturbed_pairs(suite, name, over, at)
    disturbed = " (disturbed)" if pairs["disturbed"].any() else ""
    return f"{pairs['speedup'].min():.2f} to {pairs['speedup'].max():.2f}{disturbed}"


def pair_count(suite: str, name: str, over: str = "", at: str = "") -> int:
    """Return from how many undisturbed pairs of trials a speed-up is computed; all pairs if all are disturbed."""
    return len(_undisturbed_pairs(suite, name, over, at))


def pairs_agree(suite: str, name: str, over: str = "", at: str = "") -> bool:
    """Return whether all pairs, disturbed ones too, agree that the configuration is faster, or that it is slower.

    Templates use it if pairs are too few for an interval.
    """
    faster = paired(suite, name, over, at)[0]["speedup"] > 1
    return bool(faster.all() or not faster.any())


def parity_range(suite: str) -> str:
    """Return the tokens/s of ZeRO++ at a quarter of the rate, divided by those of ZeRO-3 at the full rate.

    The two numbers are the lowest and the highest of all settings: ``0.97 and 1.12``.
    """
    rows = speedups.parity(derived(suite).trials)
    rows = rows[is_preset(rows, PROPOSED) & rows["configuration_baseline"].eq(NAMES[BASELINE])]
    ratios = [speedups.parity_interval(pairs) for _, pairs in rows.groupby(["setting", "full_rate"])]
    ends = min(each.estimate for each in ratios), max(each.estimate for each in ratios)
    disturbed = " (disturbed)" if any(each.disturbed for each in ratios) else ""
    return f"{ends[0]:.2f} and {ends[1]:.2f}{disturbed}"


def composition(suite: str, parts: Sequence[str], together: str, at: str = "") -> Estimate:
    """Return the speed-up of ``together``, divided by the product of its parts' speed-ups, pair by pair."""
    ratios, disturbed = {}, {}  # by configuration, for each pair
    for name in (together, *parts):
        pairs = paired(suite, name, "", at)[0].set_index(["occasion", "seed", "repeat"])
        ratios[name] = pairs["speedup"].astype(float)
        disturbed[name] = pairs["disturbed"].astype(bool)
    whole = pd.DataFrame(ratios).dropna()
    rows = whole.assign(disturbed=pd.DataFrame(disturbed).loc[whole.index].any(axis="columns"))
    kept = speedups.undisturbed(rows)
    logs = kept[[together, *parts]].map(math.log)
    values = logs[together] - logs[[*parts]].sum(axis="columns")
    log = mean_interval(list(values), list(values.index.get_level_values("occasion")), len(rows) - len(kept))
    ratio = replace(log, estimate=math.exp(log.estimate), low=math.exp(log.low), high=math.exp(log.high))
    ratio = replace(ratio, disturbed=bool(kept["disturbed"].any()))
    return Estimate(ratio, form_of(".2f"), f"{together} over the product of its parts in {suite}", equal=1.0)


def product(suite: str, parts: Sequence[str], at: str = "") -> Estimate:
    """Return the product of the speed-ups of several configurations, without an interval."""
    ratios = [speedup(suite, name, at=at).interval for name in parts]
    value = alone(
        math.prod(each.estimate for each in ratios), disturbed=any(each.disturbed for each in ratios)
    )
    return Estimate(value, form_of(".2f"), f"the product of {', '.join(parts)}")
