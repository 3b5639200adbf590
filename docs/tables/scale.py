"""Models answers at scales that cannot run here: ``python -m docs.tables.scale`` writes docs/scale.md.

Suites that are only planned (``suites/scale_*.toml``) are forecast on ``suites/machines/h100-dgx.toml``, from
data sheets and assumptions; each has a sentence, a table and a figure.
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
from report.data.text import listed
from report.draw import axes
from report.draw.theme import fonts

ROOT: Final = Path(__file__).parents[2]
SUITES: Final = ROOT / "suites"
DOCS: Final = ROOT / "docs"
PAYS: Final = 1.05  # the least speed-up that pays
GIB: Final = 80  # memory of a GPU
_CAVEAT: Final = (
    "Modelled, not measured: compute at a fixed share of the peak, links without contention between nodes, "
    "no stragglers, and activations not counted in memory."
)


def forecast_table(suite: str) -> pd.DataFrame:
    """The forecast of a suite, one row a trial, with the columns that figures need."""
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


def rate_in_words(table: pd.DataFrame) -> tuple[str, str]:
    """Where ZeRO++ pays no more, and its speed-ups by setting and rate."""
    largest = table[table["strategy"].eq("zeropp") & table["nodes"].eq(table["nodes"].max())]
    wide = largest.pivot_table("modelled_speed_up", ["model", "tokens_per_rank", "nodes"], "gbit")
    lines = [[f"{model}, {tokens:,}, {nodes}", *(f"{speedup:.2f}" for speedup in row)]
             for (model, tokens, nodes), row in zip(wide.index, wide.to_numpy(), strict=True)]  # fmt: skip
    least = float(wide.to_numpy().min())
    text = f"The least is {least:.2f}." if least >= PAYS else f"It pays ({PAYS} or more) not everywhere."
    return text, markdown.table(["model, tokens, nodes", *(f"{rate:g} Gbit/s" for rate in wide)], lines)


def hpz_in_words(table: pd.DataFrame) -> tuple[str, str]:
    """What each group takes and holds."""
    lines = [
        (row["policy.secondary"], f"{row['modelled_seconds']:.2f}", f"{row['memory_gib']:.1f}")
        for row in table.sort_values("policy.secondary").to_dict("records")
    ]
    text = (
        "A group of one node or less spares the backward gathers between nodes, a larger one a part of them."
    )
    return text, markdown.table(["ranks that share a copy", "s a step", "GiB a rank"], lines)


def trillion_in_words(table: pd.DataFrame) -> tuple[str, str]:
    """What a step takes, sends and holds."""
    lines = [
        (
            f"{row['gpus']:,}", row["strategy"], f"{row['modelled_seconds']:.0f}",
            f"{row['egress_bytes'] / 1e12:.2f}", f"{row['memory_gib']:.0f}",
            "yes" if row["memory_gib"] < GIB else "no",
        )
        for row in table.sort_values(["gpus", "strategy"]).to_dict("records")
    ]  # fmt: skip
    text = "One rank's schedule knows no congestion: beyond some hundred nodes these are bounds from below."
    head = ["GPUs", "strategy", "s a step", "TB out of a node", "GiB a rank", f"fits {GIB}"]
    return text, markdown.table(head, lines)


def nodes_in_words(table: pd.DataFrame) -> tuple[str, str]:
    """Efficiency at the largest number of nodes; no table."""
    kept = []
    for (batch, strategy), group in table.groupby(["batch", "strategy"]):
        ends = group.sort_values("nodes").iloc[[0, -1]]
        first, last = ends["modelled_tokens_per_second"] / ends["nodes"]
        kept.append(f"{strategy} keeps {last / first:.0%} with {batch}")
    few, many = table["nodes"].min(), table["nodes"].max()
    return f"Of the tokens/s a GPU that {few} nodes have, on {many:,} {listed(kept)}.", ""


@dataclass(frozen=True, slots=True)
class Plot:
    """One figure of a suite's forecast: ``y`` over a logarithmic ``x``, a line for each ``line``.

    ``text`` returns the sentence and the table above it.
    """

    suite: str
    x: str
    y: str
    line: Sequence[str]
    x_label: str
    y_label: str
    text: Callable[[pd.DataFrame], tuple[str, str]]


PLOTS: Final = (
    Plot("scale_rate", "gbit", "modelled_speed_up", ("model", "tokens_per_rank", "nodes"),
         "Gbit/s of a node", "speed-up of ZeRO++ over ZeRO-3", rate_in_words),
    Plot("scale_hpz", "memory_gib", "modelled_seconds", ("policy.secondary",),
         "GiB a rank, without activations", "seconds a step", hpz_in_words),
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
        if plot.suite == "scale_nodes":  # two orders of magnitude
            axes.log_ticks(ax, "y")
        ticks = sorted(table[plot.x].unique())
        ax.set_xticks(ticks, [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in ticks])
        ax.minorticks_off()
        sns.move_legend(ax, "center left", bbox_to_anchor=(1, 0.5), fontsize="small", title_fontsize="small")
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def needed_gbps(bits: float, rate: float, *, nodes: int = 64, ranks_per_node: int = 8) -> float:
    """GB/s of fp32 elements at which a codec must encode and decode to pay in a two-hop reduction.

    A node sends (2 - bits / 8) bytes an element less than in 16 bits, at ``rate`` in B/s; each of its ranks
    encodes and decodes 1 + 1 / ranks_per_node elements for it, with nothing hidden.
    """
    saved = (2 - bits / 8) * (nodes - 1) / nodes / rate
    return 4 * 2 * (1 + 1 / ranks_per_node) / saved / 1e9


def page(tables: Mapping[str, pd.DataFrame]) -> str:
    """The page as Markdown."""
    machine = machine_file.read(SUITES / "machines" / "h100-dgx.toml")
    about = (
        f"`python -m docs.tables.scale` forecasts these suites on "
        f"[{machine.name}](../suites/machines/h100-dgx.toml) and writes this page. {_CAVEAT}"
    )
    parts = ["# Modelled at scale", textwrap.fill(about, 120)]
    for plot in PLOTS:
        text, table = plot.text(tables[plot.suite])
        parts += [f"## {load(SUITES / f'{plot.suite}.toml').question}", textwrap.fill(text, 120)]
        parts += [table.rstrip()] if table else []
        parts += [f"![{plot.y_label} over {plot.x_label}](figures/{plot.suite}.svg)"]
    rates = (100, 400, 800)
    lines = [(bits, *(f"{needed_gbps(bits, rate * 1e9 / 8):,.0f}" for rate in rates)) for bits in (8, 4, 2)]
    about = (
        "GB/s of fp32 elements, encoded and decoded, at which a two-hop reduction on 64 nodes of 8 takes as "
        "long as in 16 bits, if nothing hides the codec."
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
