"""Bytes between nodes and memory."""

from __future__ import annotations

import math

from docs.numbers.estimate import Estimate, exact, form_of
from docs.numbers.records import derived, paired, trials_of
from harness.records.memory_parts import on_device
from report.data import bytes_and_memory
from report.data.text import number
from report.tables import phases


def sent(suite: str, name: str, over: str = "", at: str = "") -> Estimate:
    """Return the bytes between nodes, divided by the bytes of ``over``, by default the suite's baseline.

    The ledger counts both; if one has no ledger, the nodes' interfaces count both.
    """
    pairs, base = paired(suite, name, over, at)
    ratio = float(pairs["bytes_ratio"].median())
    if math.isnan(ratio):
        ratio = float(pairs["interface_ratio"].median())
    what = f"the bytes of {name} over {base}'s in {suite}"
    return Estimate(exact(ratio), form_of(".3f"), what, equal=1.0, more_is_better=False)


def megabytes(suite: str, name: str, at: str = "") -> Estimate:
    """Return the MB that all ranks together send between nodes in a step."""
    size = float(trials_of(suite, name, at)["sent_bytes"].median() / 1e6)
    return Estimate(exact(size), number(3), f"the MB of {name} in {suite}")


def phase_sent(suite: str, name: str, phase: str, at: str = "") -> Estimate:
    """Return the bytes between nodes in a phase of workload ``rlhf``, divided by the baseline's bytes."""
    rows = phases.by_phase(derived(suite))
    rows = trials_of(suite, name, at, rows[rows["phase"] == phase])
    ratio = float((rows["inter_bytes"] / rows["baseline_bytes"]).median())
    what = f"{name}'s bytes in phase {phase} of {suite}"
    return Estimate(exact(ratio), number(3), what, equal=1.0, more_is_better=False)


def memory(suite: str, name: str, at: str = "") -> Estimate:
    """Return the MiB that the engine holds on the device of the fullest rank, as median over trials."""
    held = derived(suite).frames.memory
    ids = trials_of(suite, name, at, derived(suite).finished)["id"]
    held = held[held["id"].isin(ids) & held["source"].eq("engine")]
    held = held[held["part"].isin(on_device(dict.fromkeys(held["part"], 0)))]
    size = float(held.groupby(["id", "rank"])["bytes"].sum().groupby("id").max().median() / 2**20)
    return Estimate(exact(size), number(3), f"the memory of {name} in {suite}")


def largest_model(suite: str, name: str, limit: str = "") -> Estimate:
    """Return the size, in million parameters, of the largest model that trained within the suite's limit of memory."""
    rows = bytes_and_memory.under_limits(derived(suite))
    rows = trials_of(suite, name, limit, rows.assign(where=rows["where"], setting="all"))
    millions, _ = bytes_and_memory.largest(rows)
    return Estimate(exact(millions), number(3), f"the largest model of {name} in {suite}")
