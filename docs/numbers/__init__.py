"""Computes the numbers that templates of documents may use, from the committed records.

A template names a suite, and a configuration as report pages print it.  If the suite has several settings, the
template also names enough parts of one setting to identify it:
``speedup("bandwidth", "ZeRO++", at="25 Mbit/s, 256 tokens/rank")``.  If a name is unknown, a :class:`DocumentError`
lists the known ones.

Claims about direction are checked when a document is built: ``assert_better(speedup("quickstart", "ZeRO++"))``
prints nothing, and fails the build when the records no longer support the claim.
"""

from __future__ import annotations

from typing import Final

from docs.numbers.estimate import DocumentError, Estimate
from docs.numbers.libraries import (
    beside_libraries,
    fastest_setting,
    not_beside,
    not_repeated,
    outcomes,
    settings_tried,
)
from docs.numbers.losses import (
    budgeted,
    error,
    final_loss,
    loss,
    loss_in_steps,
    loss_margin,
    loss_share,
    loss_verdict,
    net_speed,
    validated_at,
)
from docs.numbers.pages import (
    as_predicted,
    cell,
    count,
    disturbed,
    fact,
    facts,
    model_sizes,
    planned,
    question,
    seconds_on_record,
    several_occasions,
    table,
    title_of_figure,
)
from docs.numbers.records import REFERENCE, ROOT, derived, keep, read, suites
from docs.numbers.sizes import largest_model, megabytes, memory, phase_sent, sent
from docs.numbers.speeds import (
    composition,
    computing,
    decoding_speedup,
    exposed,
    pair_count,
    pair_range,
    pairs_agree,
    parity_range,
    phase_speedup,
    product,
    ratio_of_tokens,
    seconds,
    speedup,
    tokens_per_second,
)

__all__ = [
    "FUNCTIONS", "REFERENCE", "ROOT", "DocumentError", "Estimate", "derived", "keep", "read", "suites",
    "title_of_figure",
]  # fmt: skip

FUNCTIONS: Final = (
    speedup, seconds, sent, megabytes, error, loss, final_loss, loss_verdict, loss_margin, loss_in_steps, net_speed,
    memory, decoding_speedup, phase_speedup, phase_sent, tokens_per_second, ratio_of_tokens, largest_model,
    cell, table, question, fact, as_predicted, count, computing, suites, several_occasions,
    validated_at, loss_share, pair_range, pair_count, pairs_agree, model_sizes, disturbed,
    facts, seconds_on_record, fastest_setting, beside_libraries, outcomes, not_beside, settings_tried, not_repeated,
    exposed, parity_range, budgeted, composition, product, planned,
)  # fmt: skip
"""The functions that templates may call; :mod:`docs.build` adds figures, verdict tables and assertions."""
