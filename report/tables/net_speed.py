"""Makes the table of net speed-ups, which multiply the speed-up of a step by a ratio of numbers of steps."""

from __future__ import annotations

import math
from typing import Final

from report.data.metrics import Derived
from report.data.text import listed, number, with_interval
from report.effects import net_speed
from report.effects.net_speed import NetSpeed
from report.effects.step_seconds import unmatched
from report.quantities import formula
from report.tables.table import CONFIGURATION, RATIO, Column, Table, table_of

_COUNT: Final = "{:,.0f}".format


def net_speedup(derived: Derived) -> Table:
    """Return the table of net speed-ups: how many times as fast configurations reach their baseline's final loss.

    The seconds of a step come from one or more sources: the suite's own records, those of another suite, or a machine
    file.  A configuration has a row for each source that has its seconds and, within a source, for each setting (such
    as a link rate) in which the source has its seconds.  If no source has its seconds, the configuration has a single
    row, without a net speed-up.
    """
    rows = net_speed.net_speeds(derived)
    base = listed(list(dict.fromkeys(each.row["base"] for each in rows))) or "the baseline"
    notes = [
        f"Seconds from {source.name}: {why}."
        for source in derived.sources
        if (why := unmatched(derived, source))
    ]
    if any(each.step is None for each in rows):
        notes.append(
            "A row without seconds of a step has no net speed-up. To get these seconds, name a suite with --seconds or "
            "with this suite's key seconds, or a machine file with --machine."
        )
    return table_of(
        "net_speedup",
        "Net speed-up",
        [_printed(each) for each in rows],
        CONFIGURATION,
        Column("seeds", "Seeds", str),
        Column("own_loss", "Final loss", number(4)),
        Column("base_loss", f"{base}'s", number(4)),
        Column("steps", "Steps to the higher final loss", _COUNT, formula("steps to equal loss")),
        Column("base_steps", f"{base}'s steps", _COUNT),
        Column("steps_ratio", "Ratio of steps", RATIO, formula("ratio of steps")),
        Column("step_speedup", "Speed-up of a step", RATIO),
        Column("_source", "Seconds from", names_row=False),
        Column("_net", "Net speed-up", str, formula("net speed-up")),
        Column("net_at_both", "to the higher final loss", RATIO, formula("net speed-up to the higher loss")),
        caption=f"How many times as fast a configuration reaches the final loss of {base}, in seconds of training.",
        notes=" ".join(notes),
    )


def _printed(each: NetSpeed) -> dict[str, object]:
    row, equal, step = each.row, each.equal, each.step
    words = with_interval(each.net, RATIO) if not math.isnan(each.net.estimate) else math.nan
    if not equal.reached:
        words = net_speed.in_words(equal)
    elif equal.why:
        words = equal.why
    return {
        "where": row["where"],
        "configuration": row["configuration"],
        "records": f"{row['id']} {row['baseline']}",
        "seeds": equal.ratio.n or row["seeds"],
        "own_loss": equal.loss,
        "base_loss": equal.base,
        "steps": equal.steps,
        "base_steps": equal.base_steps,
        "steps_ratio": equal.ratio if not equal.why else math.nan,
        "step_speedup": math.nan if step is None else step.speedup,
        "source": None if step is None else step.source,
        "seconds_where": None if step is None else step.where,
        "_source": None if step is None else step.named,
        "net_speedup": each.net,
        "_net": words,
        "net_at_both": each.at_both,
    }
