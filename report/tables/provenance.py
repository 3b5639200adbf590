"""Tables of where numbers come from: links, settings, machine and code, failures, and others' prints."""

from __future__ import annotations

import pandas as pd

from report.data import metrics, published
from report.data.metrics import Derived
from report.data.text import number
from report.tables.settings import setting as settings
from report.tables.table import Column, Table


def links(derived: Derived) -> Table:
    """Table of requested and achieved rates of links."""
    aggregates = {
        "measurements": "size",
        "median_mbit": "median",
        "lowest_mbit": "min",
        "highest_mbit": "max",
    }
    rates = derived.frames.links.groupby(["kind", "requested_mbit", "when"], dropna=False)
    data = rates.agg(**{name: ("achieved_mbit", how) for name, how in aggregates.items()}).reset_index()
    data["share"] = data["median_mbit"] / data["requested_mbit"]
    columns = (
        Column("kind", "Kind"),
        Column("requested_mbit", "Requested, Mbit/s", number(3)),
        Column("when", "When"),
        Column("measurements", "n", str),
        Column("median_mbit", "Median, Mbit/s", number(4)),
        Column("lowest_mbit", "Lowest", number(4)),
        Column("highest_mbit", "Highest", number(4)),
        Column("share", "of requested", number(3)),
    )
    caption = "Rate of a node's link: calibrated before the sweep, probed after each trial."
    return Table("links", "Links", caption, data, columns)


def published_throughput(derived: Derived) -> Table:
    """The blog's throughput table, if ours is comparable: :func:`metrics.beside_published`."""
    columns = (
        Column("model", "Model"),
        Column("inter_node_gbps", "Gbit/s a node", number(3)),
        Column("tokens_per_gpu", "Tokens/GPU", str),
        Column("zero3", "ZeRO-3", number(3)),
        Column("zeropp", "ZeRO++", number(3)),
        Column("speedup", "Speed-up", number(3)),
        Column("source", "Source"),
    )
    caption = (
        "TFLOPs per GPU on 24 nodes of 16 V100, as printed (rounded) on the bars of the ZeRO++ blog; its "
        "speed-ups are drawn in the figure 'Speed-up beside the published'."
    )
    ours = metrics.beside_published(derived.pairs)
    data = published.throughput() if len(ours) else pd.DataFrame()
    return Table("published_throughput", "Published throughput", caption, data, columns)


def failures(derived: Derived) -> Table:
    """Table of trials without a result."""
    columns = (
        Column("id", "Record"),
        Column("contender", "Contender"),
        Column("where", "Where"),
        Column("repeat", "Repeat", str),
        Column("kind", "Kind"),
        Column("message", "Message"),
        Column("log", "Log"),
    )
    caption = "Trials that left a record without a result; nothing of them is in a figure."
    if derived.frames.failures["by"].notna().any():
        caption += " Refused by a peer's library: it is not here, or cannot do what was asked."
    return Table("failures", "Failed trials", caption, derived.frames.failures, columns)


def setting(derived: Derived) -> Table:
    """Table of settings: model, data, options."""
    data = pd.DataFrame(settings(derived.frames, derived.finished), columns=["setting", "value"])
    caption = (
        "What all trials were given, from their records; several values are told apart by contender where "
        "they depend on it alone. Units are what the policies gather at once. Kernels: 'reference' (plain "
        "PyTorch), 'cpu' or 'cuda' encode and decode."
    )
    return Table(
        "setting", "Setting", caption, data, (Column("setting", "Setting"), Column("value", "Value"))
    )


def environment(derived: Derived) -> Table:
    """Table of facts: machine, code, algorithms; a fact with several values has a row for each."""
    facts = derived.frames.facts.replace({"value": {"null": "none", "[]": "none"}})
    columns = [Column("fact", "Fact"), Column("value", "Value"), Column("records", "Records", str)]
    if len(derived.frames.pools) > 1:
        columns.insert(0, Column("pool", "Pool"))
    caption = "Facts on the records: machine, code, link, and the algorithms and transports that really ran."
    return Table("environment", "Environment", caption, facts, tuple(columns))
