"""Registry of all tables of the report, in page order."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pandas as pd

from report.data import bytes_and_memory, communication, decoding, footnotes, metrics, published
from report.data.contender import NAMES
from report.data.frames import groups
from report.data.metrics import Derived
from report.data.text import NOTHING, number, with_interval
from report.draw import theme
from report.draw.figure_definition import by_contender, unpublished_note
from report.tables.energy import energy
from report.tables.learning import losses
from report.tables.peers import peers
from report.tables.rates import break_even, parity
from report.tables.settings import setting as settings
from report.tables.summary import summary, time
from report.tables.table import Column, Table, placed


def all_tables(derived: Derived) -> list[Table]:
    """All tables that have rows, in page order."""
    note = footnotes.modelled_in_words(derived)
    made = [maker(derived) for maker in _MAKERS.values()]
    return [replace(table, caption=table.caption + note) for table in made if not table.data.empty]


def generation(derived: Derived) -> Table:
    """Table of decoding: tokens per second and bytes between nodes, beside the published rates."""
    columns = (
        Column("contender", "Contender"),
        Column("generations_told", "n", str),
        Column("speed_told", "Tokens/s per rank", str),
        Column("later_tokens_per_second", "without the first token", number(3)),
        Column("speedup_told", f"over {derived.compared.baseline}'s", str),
        Column("exposed", "Exposed share", number(2)),
        Column("first_mb", "Between nodes, first token, MB", number(4)),
        Column("later_mb", "each later one, MB", number(4)),
    )
    caption = (
        "Medians over generations and repeats with their 95 % interval; the ratio is the geometric mean over "
        "generations of the same number, seed and repeat. n: generations. A rank decodes several sequences "
        "at once; a token takes as long as on the slowest rank. Bytes: by the ledger, all ranks. Published: "
        "the ZeRO++ blog's RLHF figure, tokens/s per GPU, whose batches and models are others."
    )
    table = derived.generations
    if table.empty:
        return Table("generation", "Generation", caption, pd.DataFrame(), columns)
    rows = [
        _generation_row(mine)
        for _, of_cell in groups(table, ["cell"])
        for _, _, mine in by_contender(of_cell)
    ]
    for one in published.generation().to_dict("records"):
        for name in ("zero3", "zeropp"):
            told = f"published: {NAMES[name]}, {one['model']} on {one['gpus']} GPUs"
            row = {"where": rows[0]["where"], "contender": told, "generations_told": NOTHING}
            row |= {"tokens_per_second": one[name], "speed_told": number(3)(one[name])}
            ratio = one["speedup"] if name == "zeropp" else 1.0
            rows.append(row | {"speedup": ratio, "speedup_told": f"{ratio:.2f}"})
    caption += footnotes.in_words(row["generations_told"] for row in rows)
    return placed("generation", "Generation", caption, rows, *columns)


def _generation_row(mine: pd.DataFrame) -> dict[str, Any]:
    speed, paired = decoding.speed(mine), mine.dropna(subset=["baseline"])
    row = {
        "where": mine["where"].iloc[0],
        "contender": mine["contender"].iloc[0],
        "generations": len(mine),
        "generations_told": footnotes.trials(mine),
        "tokens_per_second": speed.estimate,
        "tokens_per_second_low": speed.low,
        "tokens_per_second_high": speed.high,
        "speed_told": with_interval(speed, number(3)),
        "speedup_told": NOTHING,
        "first_mb": mine["first_bytes"].median() / 1e6,
        "later_mb": mine["later_bytes"].median() / 1e6,
    }
    row |= {key: mine[key].median() for key in ("later_tokens_per_second", "exposed")}
    if len(paired):
        ratio = decoding.speedup(paired)
        row |= {"speedup": ratio.estimate, "speedup_low": ratio.low, "speedup_high": ratio.high}
        row["speedup_told"] = with_interval(ratio, "{:.2f}".format)
    return row


def volume(derived: Derived) -> Table:
    """Table of bytes between nodes in units of M, by prediction, ledger and interface."""
    parts = bytes_and_memory.volume(derived.frames, derived.trials)
    rows: list[dict[str, Any]] = []
    between = derived.trials[derived.trials["nodes"] > 1]
    keys = ["nodes", "ranks_per_node", "model", "accumulation"]
    for (nodes, ranks, model, _), of_place in groups(between.sort_values(keys, kind="stable"), keys):
        for strategy, contender, mine in by_contender(of_place):
            m = parts[parts["id"].isin(mine["id"])].groupby("part")["m"].median()
            row: dict[str, Any] = {"where": f"{nodes}x{ranks} ranks, {model}", "contender": contender}
            parted = m.reindex(bytes_and_memory.VOLUME_PARTS, fill_value=0.0 if len(m) else math.nan)
            row |= {str(part): size for part, size in parted.items()}
            for name, sent in (("predicted",) * 2, ("ledger", "sent"), ("interface",) * 2, ("segment",) * 2):
                row[name] = (mine[f"{sent}_bytes"] / mine["m_bytes"]).median()
            row |= {"published": published.total(strategy, contender), "m_bytes": mine["m_bytes"].median()}
            rows.append(row)
    heads = ("Forward gather", "Backward gather", "Gradients", "Control", "Padding")
    columns = (
        Column("contender", "Contender"),
        *(
            Column(part, head, number(3))
            for part, head in zip(bytes_and_memory.VOLUME_PARTS, heads, strict=False)
        ),
        Column("predicted", "Predicted", number(4)),
        Column("ledger", "Ledger", number(4)),
        Column("interface", "Interface", number(4)),
        Column("segment", "In 1,448-byte segments", number(4)),
        Column("published", "Published rule", number(3)),
    )
    caption = (
        "Bytes between nodes per step in units of M, one hierarchical 16-bit gather of the model without "
        "padding, which is a column of its own and in no other part. Interfaces count headers too, of "
        "packets that this machine makes larger than a real network does; in segments: the ledger with 66 "
        "bytes for each 1,448 bytes of a message. The published rule counts no scales. "
        f"{unpublished_note(between)}"
    ).rstrip()
    return placed("volume", "Volume between nodes", caption, rows, *columns)


def checks(derived: Derived) -> Table:
    """Table of checks: bytes against prediction, first loss against that of a single process."""
    rows: list[dict[str, Any]] = []
    for (where,), of_place in groups(derived.trials, ["where"]):
        for _, contender, mine in by_contender(of_place):
            equal = mine["predicted_equal"].dropna().astype(bool)
            stated = mine["sent_bytes"] + mine["header_bytes"]
            reference = mine["reference_loss"]
            rows.append(
                {
                    "where": where,
                    "contender": contender,
                    "trials": len(mine),
                    "equal": f"{int(equal.sum())} of {len(equal)}" if len(equal) else NOTHING,
                    "interface_over_ledger": (mine["interface_bytes"] / mine["sent_bytes"]).median(),
                    "interface_over_stated": (mine["interface_bytes"] / stated).median(),
                    "gradient_share": mine["gradient_share"].max(),
                    "first_loss_deviation": ((mine["first_loss"] - reference).abs() / reference).max(),
                }
            )
    columns = (
        Column("contender", "Contender"),
        Column("trials", "n", str),
        Column("equal", "Ledger as predicted", str),
        Column("interface_over_ledger", "Interface/ledger", number(4)),
        Column("interface_over_stated", "Interface/(ledger + headers)", number(4)),
        Column("first_loss_deviation", "First loss, relative deviation", number(2)),
        Column("gradient_share", "First gradient, difference/allowed", number(2)),
    )
    caption = (
        "Trials whose ledger equals the prediction to the byte, row by row; bytes that the interfaces "
        "counted over the ledger's, and over the ledger's with the headers of the packets; and the largest "
        "relative difference of the first step's loss from a single process on the same batches; and the "
        "largest difference of a reduced gradient before training from a single process's, over what the "
        "codecs allow together."
    )
    return placed("checks", "Checks", caption, rows, *columns)


def memory(derived: Derived) -> Table:
    """Table of memory of the rank that holds most: engine beside formula, by part, and the process."""
    found = bytes_and_memory.memory(derived.frames, derived.trials)
    places = ["nodes", "ranks_per_node", "model"]
    rows = [
        {
            "where": f"{nodes}x{ranks} ranks, {model}",
            "contender": contender,
            **_memory_row(mine),
            **_copy_row(derived, mine),
        }
        for (nodes, ranks, model), group in groups(found.sort_values(places, kind="stable"), places)
        for _, contender, mine in by_contender(group)
    ]
    if not any(row["beyond_mib"] for row in rows):  # then Sum says it all
        rows = [row | {"beyond_mib": math.nan, "covered_mib": math.nan} for row in rows]
    data = pd.DataFrame(rows)
    held = found[(found["source"] == "engine") & (found["bytes"] > 0)]["part"].unique()
    usual = [part for part in theme.MEMORY if part in held]  # as in the figure; others after them
    parts = [*usual, *sorted(set(held) - set(usual))]
    columns = (
        Column("contender", "Contender"),
        *(Column(f"engine_{part}_mib", part.replace("_", " "), number(3)) for part in parts),
        Column("engine_mib", "Sum", number(4)),
        Column("beyond_mib", "Without formula", number(3)),
        Column("covered_mib", "With formula", number(4)),
        Column("formula_mib", "Formula", number(4)),
        *(
            Column(key, title, number(3))
            for key, title in _COPY.items()
            if len(data) and data[key].notna().any()
        ),
        Column("process_peak_rss_mib", "Process peak", number(3)),
        *(
            Column(f"{source}_step_mib", title, number(4))
            for source, title in (("copied", "Copied, a step"), ("copied_formula", "Copied, formula"))
            if len(data) and data[f"{source}_step_mib"].notna().any()
        ),
    )
    apart = "covered_mib" in data and data["covered_mib"].notna().any()
    beyond = "of that, parts without and with a formula; the sum of the formulas, to compare with the latter"
    copied = any(column.key.startswith("copied") for column in columns)
    caption = (
        "MiB of the fullest rank: what the engine owns, by part and in sum; "
        f"{beyond if apart else 'the sum of the formulas'}; and the process."
        + (
            " Of what is offloaded (host parts) also what is copied between host and device in a step."
            if copied
            else ""
        )
        + (
            " hpZ's copy: by formula, as the frames that came and in 16 bits, as DeepSpeed and the paper "
            "keep it, whichever was kept."
            if any(column.key in _COPY for column in columns)
            else ""
        )
    )
    return placed("memory", "Memory per rank", caption, rows, *columns)


_COPY: Final = {"copy_frames_mib": "hpZ's copy as frames", "copy_halves_mib": "in 16 bits"}


def _copy_row(derived: Derived, mine: pd.DataFrame) -> dict[str, float]:
    """MiB of one contender's hpZ copy by formula, in either form; NaN without one."""
    of_ids = [bytes_and_memory.secondary_either_way(derived.frames, str(one)) for one in mine["id"].unique()]
    return dict(zip(_COPY, (np.array(of_ids).max(axis=0) / 2**20).tolist(), strict=True))


def _memory_row(mine: pd.DataFrame) -> dict[str, float]:
    """MiB of one contender by source and part, and sums: of parts with and without a formula too."""
    sizes = mine.groupby(["source", "part"])["bytes"].median() / 2**20
    told = sizes.drop(["copied", "copied_formula"], level="source", errors="ignore").reset_index()
    row = {f"{source}_{part}_mib": float(size) for source, part, size in told.to_numpy()}
    of_source = {name: found.droplevel(0) for name, found in sizes.groupby(level="source")}
    for name, source in (
        ("engine",) * 2,
        ("formula",) * 2,
        ("copied_step", "copied"),
        ("copied_formula_step", "copied_formula"),
    ):
        row[f"{name}_mib"] = of_source[source].sum() if source in of_source else math.nan
    engine, formula = (of_source.get(source, sizes.iloc[:0]) for source in ("engine", "formula"))
    row["beyond_mib"] = engine[~engine.index.isin(formula.index)].sum()
    return row | {"covered_mib": row["engine_mib"] - row["beyond_mib"]}


def sent_error(derived: Derived) -> Table:
    """Table of the error of what was sent, hop by hop and end to end, at the measured steps."""
    found = communication.errors(derived.frames, derived.trials)
    rows = [
        _sent_error_row(mine, derived)
        for _, of_step in groups(found, ["cell", "step"])
        for _, _, mine in by_contender(of_step)
    ]
    rows.sort(key=lambda row: row["order"])
    columns = (
        Column("contender", "Contender"),
        Column("step", "Step", str),
        Column("trials_told", "n", str),
        Column("cosine", "Cosine of ranks", number(3)),
        Column("hops_told", "Each hop"),
        Column("end_to_end", "End to end", number(3)),
        Column("repeated", f"of {_repeated(found)} reductions' sum", number(3)),
        Column("weights", "Weights", number(3)),
        Column("secondary", "from hpZ's copy", number(3)),
    )
    caption = (
        "vNMSE, sums over all units; medians over repeats and seeds. Each hop: the decoded frames that it "
        "sends, against the values that were encoded there (error feedback included). End to end: "
        "sum((reduced - mean)^2) / sum(mean^2), the mean being that of all ranks' gradients, sent as they "
        "are in fp32 and added up in fp64. Cosine: between ranks' gradients, mean over all pairs: the less "
        "they agree, the smaller their mean, and the larger the same error of a hop is beside it. With error "
        "feedback the error of one step includes what earlier ones left over; what it lowers, as random "
        "rounding does, is the error of the sum of steps: here of so many reductions of the same gradients, "
        "which for all others is that of one. Weights: gathered against "
        "fp32 masters. Measured just before the step of that number, in passes that are not timed."
        f"{footnotes.in_words(row['trials_told'] for row in rows)}"
    )
    if not rows:
        return Table("sent_error", "Error of what was sent", caption, pd.DataFrame(), columns)
    return placed("sent_error", "Error of what was sent", caption, rows, *columns)


def _repeated(found: pd.DataFrame) -> str:
    """How many reductions were added up."""
    return ", ".join(str(count) for count in sorted(set(found["repeated"]) - {1}))


def _sent_error_row(mine: pd.DataFrame, derived: Derived) -> dict[str, Any]:
    """One contender in one cell at one step."""
    ends = communication.end_to_end(mine)
    hops = communication.of_hops(mine)
    first = mine.iloc[0]
    ran = derived.trials[derived.trials["id"].isin(mine["id"])]
    return {
        "where": first["where"],
        "contender": first["contender"],
        "step": int(first["step"]),
        "trials": len(ran),
        "trials_told": footnotes.trials(ran),
        "cosine": communication.median(ends, "cosine"),
        "hops_told": communication.hops_told(hops),
        "smallest_of_a_hop": float(hops["vnmse"].min()),
        "largest_of_a_hop": float(hops["vnmse"].max()),
        "end_to_end": communication.median(ends),
        "repeated": communication.median(communication.end_to_end(mine, repeated=True)),
        "weights": communication.median(communication.end_to_end(mine, "weights")),
        "secondary": communication.median(communication.end_to_end(mine, "secondary")),
        "order": int(ran.index[0]),
    }


def quantisation(derived: Derived) -> Table:
    """Table of the median vNMSE of each codec that was tried, by block size."""
    caption = (
        "Median vNMSE = sum((decoded - x)^2) / sum(x^2) over units and trials, by elements per block; "
        "'shard' is one scale for a whole shard."
    )
    return _tried(derived, "quantisation", "Codecs tried", caption, "vnmse")


def largest_error(derived: Derived) -> Table:
    """Table of the largest error of each codec that was tried, by block size."""
    caption = "Largest |decoded - x| over the largest |x|, of any unit and trial, by elements per block."
    return _tried(derived, "largest_error", "Codecs tried: largest error", caption, "largest")


def _tried(derived: Derived, name: str, title: str, caption: str, value: str) -> Table:
    """Errors with one row per tensor, bits and kind of codec, and one column per block size."""
    found, where = communication.tried(derived.frames, derived.trials)
    caption += (
        f" Each codec encodes once what training left to {where}: weights, and reduced gradients. Nothing of "
        "it is sent; what was sent has a table of its own."
    )
    parts = [[*str(codec).split(":", 2), "", ""][:3] for codec in found["codec"]]
    kinds = [f"{head} {options}".strip() for head, _, options in parts]
    told = found.assign(kind=kinds, block=[block or "none" for _, block, _ in parts])
    wide = told.pivot_table(
        index=["purpose", "kind"],
        columns="block",
        values=value,
        aggfunc="median" if value == "vnmse" else "max",
    )
    blocks = sorted(wide.columns, key=lambda block: float(block) if block.isdecimal() else math.inf)
    columns = (
        Column("purpose", "Of"),
        Column("kind", "Codec"),
        *(Column(block, "no blocks" if block == "none" else block, number(3)) for block in blocks),
    )
    return Table(name, title, caption, wide[blocks].reset_index(), columns)


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


_MAKERS: Final[dict[str, Callable[[Derived], Table]]] = {
    maker.__name__: maker
    for maker in (
        summary, peers, time, energy, losses, failures, generation, volume, checks, parity, break_even,
        memory, sent_error, quantisation, largest_error, links, published_throughput, setting, environment,
    )
}  # fmt: skip
NAMES_OF_FILES: Final = tuple(_MAKERS)


def maker_of(name: str) -> Callable[[Derived], Table]:
    """The function that makes the table of that name."""
    return _MAKERS[name]
