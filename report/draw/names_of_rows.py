"""Groups the rows of a tidy table by configuration and setting, names the groups, and describes them in captions."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from harness.suites.peers import PEERS, Compute
from report.data.configuration import NAMES
from report.data.text import listed


def common_and_rest(wheres: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """Return the parts that all descriptions of settings share, and the remaining parts of each description."""
    parts = {where: where.split(", ") for where in map(str, wheres)}
    common = [
        part for part in next(iter(parts.values()), []) if all(part in setting for setting in parts.values())
    ]
    rest = {
        where: ", ".join(part for part in setting if part not in common) for where, setting in parts.items()
    }
    return common, rest


def titles_of(data: pd.DataFrame) -> dict[str, str]:
    """Return a short title of each setting: the fields in which it differs from the table's other settings."""
    where = data.drop_duplicates("setting").set_index("setting")["where"]
    titles = common_and_rest(where)[1]
    return {str(setting): titles[str(text)] for setting, text in where.items()}


def common_to(data: pd.DataFrame) -> str:
    """Return a caption's sentence on what all settings have in common: ``Common setting: 2x2 ranks.``"""
    common = common_and_rest(data["where"].unique())[0]
    return f"Common setting: {', '.join(common)}." if common else ""


def peers_note(data: pd.DataFrame) -> str:
    """Return a caption's text on what peers send, if ``data`` has trials of peers."""
    senders: dict[str, dict[str, None]] = {"fp32": {}, "bf16": {}}
    for strategy, configuration in zip(
        data["strategy"], data.get("configuration", data["strategy"]), strict=True
    ):
        if strategy in PEERS and strategy != "single":
            compute: Compute = "bf16" if "compute bf16" in configuration else "fp32"
            wire = PEERS[strategy].wire(compute, "fp32" if "g fp32" in configuration else "compute")
            senders.setdefault(wire, {})[NAMES[strategy]] = None
    sentences = [
        f"{listed(list(names))} {'send' if len(names) > 1 else 'sends'} {wire}"
        for wire, names in senders.items()
        if names
    ]
    if any(PEERS[strategy].family == "fsdp2" for strategy in set(data["strategy"]) & set(PEERS)):
        sentences.append("on gloo, FSDP2's reduce-scatter sends the bytes of an all-reduce")
    return f"{'; '.join(sentences)}." if sentences else ""


def configurations(data: pd.DataFrame) -> list[str]:
    """Return the distinct configurations: by strategy, and those of one strategy in the order of the suite's trials."""
    return list(data.sort_values(["place", "first"], kind="stable")["configuration"].unique())


def by_configuration(data: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Return (configuration, its rows) for each configuration, in the order of :func:`configurations`."""
    return [(name, data[data["configuration"] == name]) for name in configurations(data)]


def by_setting(data: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Return (short title, rows) of each setting."""
    return [(title, data[data["setting"] == setting]) for setting, title in titles_of(data).items()]


def by_setting_and_configuration(data: pd.DataFrame) -> list[tuple[str, str, pd.DataFrame]]:
    """Return (name, configuration, rows) of each configuration of each setting; the name ends with the setting."""
    return [
        (f"{configuration}, {title}" if title else configuration, configuration, group)
        for title, rows in by_setting(data)
        for configuration, group in by_configuration(rows)
    ]
