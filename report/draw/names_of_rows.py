"""Groups the rows of a tidy table by configuration and setting, names the groups, and describes them in captions."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from harness.suites.peers import PEERS, Compute
from report.data.configuration import NAMES
from report.data.text import listed


def common_and_rest(wheres: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """Return what descriptions of settings have in common, and the rest of each description.

    A description is a text such as ``2x2 ranks, 50 Mbit/s``; commas separate its parts.  The first result lists the
    parts that all descriptions have.  The second result maps each description to a text with its other parts.
    """
    parts = {where: where.split(", ") for where in map(str, wheres)}
    common = [
        part for part in next(iter(parts.values()), []) if all(part in setting for setting in parts.values())
    ]
    rest = {
        where: ", ".join(part for part in setting if part not in common) for where, setting in parts.items()
    }
    return common, rest


def titles_of(data: pd.DataFrame) -> dict[str, str]:
    """Return a short title for each setting (cluster, model, batch and so on), by the setting's hash.

    The table has a description of each setting, such as ``2x2 ranks, 50 Mbit/s``.  A title lists those parts of the
    description that not all settings of the table share.  It is empty if the table has a single setting.
    """
    where = data.drop_duplicates("setting").set_index("setting")["where"]
    titles = common_and_rest(where)[1]
    return {str(setting): titles[str(text)] for setting, text in where.items()}


def common_to(data: pd.DataFrame) -> str:
    """Return a caption's sentence on what all settings of the table have in common: ``Common setting: 2x2 ranks.``

    The text is empty if the settings have nothing in common.
    """
    common = common_and_rest(data["where"].unique())[0]
    return f"Common setting: {', '.join(common)}." if common else ""


def peers_named(some: Iterable[str], shown: Iterable[str]) -> list[str]:
    """Return names for strategies of libraries such as FSDP2, as a sentence prints them.

    ``some`` are the strategies to name, and ``shown`` all strategies that the figure shows.  For each library, there
    are two cases:

    * The figure shows several strategies of the library, and ``some`` has all of them.  The library's name stands for
      these strategies.
    * All other cases.  Each strategy in ``some`` has its own name, in quotation marks if the name has a comma.

    For example, let the figure show the strategies ``FSDP2`` and ``FSDP2, kept`` of the library FSDP2.  If ``some`` has
    both, the result is ``FSDP2``.  If ``some`` has only the second, the result is ``"FSDP2, kept"``.
    """
    of_library: dict[str, list[str]] = {}
    for strategy in dict.fromkeys(some):
        of_library.setdefault(PEERS[strategy].family, []).append(strategy)
    present, names = {each for each in shown if each in PEERS}, list[str]()
    for library, own in of_library.items():
        if len(own) > 1 and {each for each in present if PEERS[each].family == library} <= {*own}:
            names.append(NAMES[library])
        else:
            names += [f'"{NAMES[each]}"' if "," in NAMES[each] else NAMES[each] for each in own]
    return names


def peers_note(data: pd.DataFrame) -> str:
    """Return a caption's sentence on the types that DDP, FSDP2 and DeepSpeed send; empty if ``data`` has none of them.

    For example, ``DDP sends fp32; FSDP2 sends the type in which it computes.``
    """
    wires: dict[str, set[str]] = {}
    computed: dict[str, bool] = {}  # whether a peer sends the type in which it computes
    for strategy, configuration in zip(
        data["strategy"], data.get("configuration", data["strategy"]), strict=True
    ):
        if strategy in PEERS and strategy != "single":
            compute: Compute = "bf16" if "compute bf16" in configuration else "fp32"
            wire = PEERS[strategy].wire(compute, "fp32" if "g fp32" in configuration else "compute")
            wires.setdefault(strategy, set()).add(wire)
            computed[strategy] = computed.get(strategy, True) and wire == compute
    following = [strategy for strategy, sent in wires.items() if len(sent) > 1 and computed[strategy]]
    sentences = []
    if following:
        names = peers_named(following, wires)
        verb, own = ("send", "they compute") if len(names) > 1 else ("sends", "it computes")
        sentences.append(f"{listed(names)} {verb} the type in which {own}")
    for wire in sorted(
        {wire for sent in wires.values() for wire in sent}, key=["fp32", "bf16", "bf16 and fp32"].index
    ):
        senders = [strategy for strategy, sent in wires.items() if wire in sent and strategy not in following]
        names = peers_named(senders, wires)
        if names:
            sentences.append(f"{listed(names)} {'send' if len(names) > 1 else 'sends'} {wire}")
    if any(PEERS[strategy].family == "fsdp2" for strategy in wires):
        sentences.append("on gloo, FSDP2's reduce-scatter sends the bytes of an all-reduce")
    return f"{'; '.join(sentences)}." if sentences else ""


def configurations(data: pd.DataFrame) -> list[str]:
    """Return the distinct configurations, in the order in which pages list them.

    They are ordered by strategy; configurations of one strategy are in the order of the suite's trials.
    """
    return list(data.sort_values(["place", "first"], kind="stable")["configuration"].unique())


def by_configuration(data: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Return a pair (name, rows) for each configuration of a table, in the order of :func:`configurations`."""
    return [(name, data[data["configuration"] == name]) for name in configurations(data)]


def by_setting(data: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Return a pair (title, rows) for each setting (cluster, model, batch and so on) of a table.

    The title says how the setting differs from the table's other settings (:func:`titles_of`).
    """
    return [(title, data[data["setting"] == setting]) for setting, title in titles_of(data).items()]


def by_setting_and_configuration(data: pd.DataFrame) -> list[tuple[str, str, pd.DataFrame]]:
    """Return (name, configuration, rows) for each configuration in each setting (cluster, model, batch and so on).

    The name is the configuration's name, followed by the short title of the setting if there are several settings.
    """
    return [
        (f"{configuration}, {title}" if title else configuration, configuration, group)
        for title, rows in by_setting(data)
        for configuration, group in by_configuration(rows)
    ]
