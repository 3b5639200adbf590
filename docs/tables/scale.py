"""Predicts steps at scales that cannot be run here: ``python -m docs.tables.scale`` writes docs/scale.md.

The suites ``suites/scale_*.toml`` are planned, not run, on the machine ``suites/machines/h100-dgx.toml``, which
rests on data sheets and assumptions.  The page has a sentence, a table and a figure for each suite.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import matplotlib.figure
import pandas as pd
import seaborn as sns

from docs.tables import markdown
from harness.measure import machine_file
from harness.plan_rows import rows
from harness.runs.feasibility import any_host, forecast
from harness.suites.suite_file import load
from report.draw import axes
from report.draw.theme import fonts

ROOT: Final = Path(__file__).parents[2]
SUITES: Final = ROOT / "suites"
DOCS: Final = ROOT / "docs"
PAYS: Final = 1.05  # the smallest speed-up with which a page says that ZeRO++ pays
GIB: Final = 80  # memory of a GPU, in GiB
_CAVEAT: Final = (
    "The numbers are modelled, not measured. The model assumes that GPUs compute at a fixed share of their peak, that "
    "links between nodes have no contention, and that there are no stragglers. Memory includes the buffers of "
    "messages, but no activations."
)


def forecast_table(suite: str) -> pd.DataFrame:
    """Return the forecast of a suite: a row for each trial, with the columns that the figures need."""
    machine = machine_file.read(SUITES / "machines" / "h100-dgx.toml")
    table = pd.DataFrame(rows(forecast(load(SUITES / f"{suite}.toml").trials, any_host()), machine))
    table = table.assign(
        gbit=table["rate_mbit"] / 1e3,
        gpus=table["nodes"] * table["ranks_per_node"],
        memory_gib=table["memory_bytes"] / 2**30,
    )
    if suite != "scale_nodes":
        return table
    weak, strong = table["tokens_per_rank"].eq(2048), (table["tokens_per_rank"] * table["gpus"]).eq(1 << 20)
    return pd.concat(
        [table[weak].assign(batch="2,048 tokens a rank"), table[strong].assign(batch="1 Mi tokens in all")]
    )


def _setting(table: pd.DataFrame) -> str:
    """Return sentences on the model, the nodes and the batch of a suite with one model and one rate."""
    first = table.iloc[0]
    nodes = f"each of {first['nodes']:,} nodes" if len(set(table["nodes"])) == 1 else "each node"
    text = f"The model has {first['parameters'] / 1e9:,.0f} B parameters, and {nodes} has "
    text += f"{first['ranks_per_node']} GPUs and {first['gbit']:g} Gbit/s."
    if len(set(table["tokens_per_rank"])) == 1:
        text += f" Each rank has {first['tokens_per_rank']:,} tokens in a step."
    return text


def rate_in_words(table: pd.DataFrame) -> tuple[str, str]:
    """Return sentences on the speed-ups of ZeRO++ on the most nodes, and a table of them by setting and rate."""
    largest = table[table["strategy"].eq("zeropp") & table["nodes"].eq(table["nodes"].max())]
    ends = ("modelled_speed_up", "modelled_fits_low_speed_up", "modelled_fits_high_speed_up")
    best, low, high = (
        largest.pivot_table(name, ["model", "tokens_per_rank", "nodes"], "gbit") for name in ends
    )
    cells = [
        [f"{value:.2f} ({least:.2f} to {most:.2f})" for value, least, most in zip(*rows, strict=True)]
        for rows in zip(best.to_numpy(), low.to_numpy(), high.to_numpy(), strict=True)
    ]
    lines = [
        [f"{model}, {tokens:,}, {nodes}", *row]
        for (model, tokens, nodes), row in zip(best.index, cells, strict=True)
    ]
    least = float(low.to_numpy().min())
    text = (
        f"The table shows the speed-up of ZeRO++ over ZeRO-3 on {table['nodes'].max():,} nodes, and in parentheses its "
        "interval over the shares of the "
        "GPU's peak that published steps achieve. "
    )
    text += (
        f"ZeRO++ pays in every setting of the table: the lowest end of an interval is {least:.2f}."
        if least >= PAYS
        else f"ZeRO++ does not pay everywhere: some speed-ups are below {PAYS}."
    )
    return text, markdown.table(
        ["model, tokens a rank, nodes", *(f"{rate:g} Gbit/s" for rate in best)], lines
    )


def hpz_in_words(table: pd.DataFrame) -> tuple[str, str]:
    """Return a sentence on hpZ groups, and a table of the step time and the memory with each of them."""
    fastest = table[table["modelled_seconds"] <= 1.01 * table["modelled_seconds"].min()]
    best = fastest.loc[fastest["memory_gib"].idxmin()]
    lines = [
        (row["policy.secondary"] or "no copy", f"{row['modelled_seconds']:.2f}", f"{row['memory_gib']:.1f}")
        for row in table.sort_values("policy.secondary").to_dict("records")
    ]
    text = (
        f"{_setting(table)} Of the groups with the shortest step, that of {best['policy.secondary']} ranks needs the "
        "least memory. With a group of at most one node, the backward pass gathers nothing between nodes; with a "
        "larger group, it gathers a part between nodes."
    )
    return text, markdown.table(["ranks that share a copy", "s/step", "GiB/rank"], lines)


def trillion_in_words(table: pd.DataFrame) -> tuple[str, str]:
    """Return a sentence, and a table of the time, traffic and memory of a step with 1 T parameters."""
    lines = [
        (
            f"{row['gpus']:,}", row["strategy"], f"{row['modelled_seconds']:.0f}",
            f"{row['egress_bytes'] / 1e12:.2f}", f"{row['memory_gib']:.0f}",
            "yes" if row["memory_gib"] < GIB else "no",
        )
        for row in table.sort_values(["gpus", "strategy"]).to_dict("records")
    ]  # fmt: skip
    text = (
        f"{_setting(table)} The model simulates the schedule of one rank and has no congestion of the network, so that "
        "beyond a few hundred nodes the times are lower bounds."
    )
    head = ["GPUs", "strategy", "s/step", "TB out of a node", "GiB/rank", f"fits {GIB} GiB"]
    return text, markdown.table(head, lines)


def nodes_in_words(table: pd.DataFrame) -> tuple[str, str]:
    """Return a sentence, and a table of the efficiency at the largest number of nodes."""
    lines = []
    for (batch, strategy), group in table.groupby(["batch", "strategy"]):
        ends = group.sort_values("nodes").iloc[[0, -1]]
        first, last = ends["modelled_tokens_per_second"] / ends["nodes"]
        lines.append((batch, strategy, f"{last / first:.0%}"))
    few, many = table["nodes"].min(), table["nodes"].max()
    text = (
        f"{_setting(table)} Efficiency is the tokens/s of a GPU on {many:,} nodes, relative to {few} nodes."
    )
    return text, markdown.table(["batch", "strategy", "efficiency"], lines)


@dataclass(frozen=True, slots=True)
class Plot:
    """One figure of a suite's forecast: ``y`` over a logarithmic ``x``."""

    suite: str
    x: str  # column
    y: str  # column
    line: Sequence[str]  # columns; trials with equal values in all of them form one line
    x_label: str
    y_label: str
    text: Callable[[pd.DataFrame], tuple[str, str]]  # makes the sentence and the table above the figure


PLOTS: Final = (
    Plot("scale_rate", "gbit", "modelled_speed_up", ("model", "tokens_per_rank", "nodes"),
         "Gbit/s of a node", "speed-up of ZeRO++ over ZeRO-3", rate_in_words),
    Plot("scale_hpz", "memory_gib", "modelled_seconds", ("policy.secondary",),
         "GiB per rank, without activations", "seconds per step", hpz_in_words),
    Plot("scale_trillion", "gpus", "modelled_tflops", ("strategy",), "GPUs", "TFLOPS/GPU", trillion_in_words),
    Plot("scale_nodes", "nodes", "modelled_tokens_per_second", ("strategy", "batch"), "nodes", "tokens/s",
         nodes_in_words),
)  # fmt: skip


def draw(plot: Plot, table: pd.DataFrame, path: Path) -> None:
    """Write a figure as SVG."""
    if plot.suite == "scale_rate":
        table = table[table["strategy"] == "zeropp"]
    names = table[list(plot.line)].astype(str).agg(", ".join, axis=1).rename(", ".join(plot.line))
    with fonts():
        figure = matplotlib.figure.Figure(figsize=(7, 3.4), layout="constrained")
        ax = figure.subplots()
        sns.lineplot(table, x=plot.x, y=plot.y, hue=names, style=names, markers=True, ax=ax)
        ax.set(xscale="log", xlabel=plot.x_label, ylabel=plot.y_label)
        if plot.suite == "scale_nodes":  # its values span two orders of magnitude
            axes.log_ticks(ax, "y")
        ticks = sorted(table[plot.x].unique())
        ax.set_xticks(ticks, [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in ticks])
        ax.minorticks_off()
        sns.move_legend(ax, "center left", bbox_to_anchor=(1, 0.5), fontsize="small", title_fontsize="small")
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def needed_gbps(bits: float, rate: float, *, nodes: int = 64, ranks_per_node: int = 8) -> float:
    """Return the GB/s of fp32 elements at which a codec takes as much time to encode and decode as it saves in sending.

    With a codec of ``bits`` a node sends (2 - bits / 8) bytes less than in 16 bits for each element of a two-hop
    reduction, at ``rate`` in B/s.  For each element, a rank encodes and decodes 1 + 1 / ranks_per_node elements, and
    none of this time is hidden.
    """
    saved = (2 - bits / 8) * (nodes - 1) / nodes / rate
    return 4 * 2 * (1 + 1 / ranks_per_node) / saved / 1e9


def page(tables: Mapping[str, pd.DataFrame]) -> str:
    """Return the page as Markdown."""
    machine = machine_file.read(SUITES / "machines" / "h100-dgx.toml")
    about = (
        f"`python -m docs.tables.scale` plans the suites `suites/scale_*.toml` on the machine "
        f"[{machine.name}](../suites/machines/h100-dgx.toml) and writes this page. {_CAVEAT}"
    )
    parts = ["# Predictions at scale", textwrap.fill(about, 120)]
    for plot in PLOTS:
        text, table = plot.text(tables[plot.suite])
        parts += [f"## {load(SUITES / f'{plot.suite}.toml').question}", textwrap.fill(text, 120)]
        parts += [table.rstrip()] if table else []
        parts += [f"![{plot.y_label} over {plot.x_label}](figures/{plot.suite}.svg)"]
    rates = (100, 400, 800)
    lines = [(bits, *(f"{needed_gbps(bits, rate * 1e9 / 8):,.0f}" for rate in rates)) for bits in (8, 4, 2)]
    about = (
        "A codec pays if it encodes and decodes more GB/s of fp32 elements than the table shows. At the speed in the "
        "table, a two-hop reduction on 64 nodes of 8 ranks takes as long as in 16 bits, provided that nothing hides "
        "the codec's time."
    )
    parts += ["## How fast must a codec be to pay?", textwrap.fill(about, 120)]
    return "\n\n".join([*parts, markdown.table(["bits", *(f"{rate} Gbit/s" for rate in rates)], lines)])


def main() -> None:
    """Write docs/scale.md and its figures."""
    tables = {plot.suite: forecast_table(plot.suite) for plot in PLOTS}
    for plot in PLOTS:
        draw(plot, tables[plot.suite], DOCS / "figures" / f"{plot.suite}.svg")
    (DOCS / "scale.md").write_text(page(tables), encoding="utf-8")


if __name__ == "__main__":
    main()
