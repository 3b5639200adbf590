"""``zeropp bench formats``: ranks codecs by their errors on a snapshot of weights and gradients, without training.

Weights and changes of weights are encoded and decoded once.  A codec's error on them is the difference between the
decoded and the exact values.

Gradients pass through a reduction in two hops, as in training.  In the first hop, each rank's gradient is encoded and
decoded, and summed in fp32 over the ranks of the node.  In the second hop, these sums are encoded and decoded, summed
over the nodes, and divided by the number of ranks.  With a single node, there is no second hop.  A codec's error on
gradients is the difference between this result and the exact mean of the gradients.

Files that :mod:`harness.lab.snapshot` has not written can be read too.  Each tensor of such a file counts as the
weights of a unit (a set of parameters that are sent together), unless its name begins with ``changes/`` or
``gradients/``.  A tensor of gradients has a row for each rank.  If the file has no metadata, all ranks count as ranks
of one node.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from harness.errors import Refusal
from harness.records.archive import SUFFIX, unpack
from harness.records.trial_record import Record, read_valid
from harness.suites.repeat_order import setting_of
from harness.suites.trial import Trial
from impl import ops, regular_file
from impl.codecs.codec import Codec, common_grain, parse
from impl.codecs.own_rows import used_bytes
from impl.codecs.rounding_noise import Key
from impl.plan.bit_budget import BudgetError, Cost, bits_for, bytes_within, choose, total

CODECS: Final = (
    "bf16", "int8:128", "fp8e4m3:128", "mxfp8", "mxfp6e2m3", "mxfp6e3m2", "int6:128", "int4:128",
    "int4:128:clip", "int4:128:asym", "int4:128:stochastic", "int4:128:hadamard32", "nvfp4", "mxfp4", "nf4",
    "spike3", "int3:128", "spike2", "int2:128", "sign1", "lossless:zlib", "lossless:zlib:bf16",
)  # fmt: skip
_RESAMPLED: Final = 2000  # bootstrap samples of seeds
_FEWEST: Final = 5  # least number of codecs with losses for a rank correlation
Sizes = tuple[int, int]  # nodes, and ranks per node
Sent = tuple[Tensor, int, float]
"""(decoded elements, bytes of the frames of one sender, seconds that encoding and decoding took).

In the first hop of a reduction, a sender is a rank.  In the second hop, it is a node, whose ranks send these bytes
together.
"""


class Unit(NamedTuple):
    """A tensor of a snapshot: weights, changes of weights, or gradients of one unit at one step.

    A unit is a set of parameters that are sent together.
    """

    kind: str  # weights, changes or gradients
    name: str  # ``UNIT@STEP`` in our snapshots
    x: Tensor  # (P,) fp32; gradients (ranks, P)


def units_of(path: Path) -> tuple[list[Unit], Sizes]:
    """Read a snapshot file, and return its tensors (:class:`Unit`) and the pair (nodes, ranks per node).

    The two numbers describe the cluster on which the snapshot's gradients are to be reduced.  If the file does not have
    them, there is one node, and each row of a gradient tensor is one of its ranks.

    Raises:
        Refusal: If the file cannot be read or has no tensor of floating-point numbers, or if ``nodes`` or
            ``ranks_per_node`` in its metadata is not a whole number above 0.
    """
    from safetensors import SafetensorError, safe_open

    try:
        regular_file.status(path)
        with safe_open(path, framework="pt") as file:
            metadata: Mapping[str, str] = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    except (SafetensorError, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Refusal(
            f"{path}: cannot be read as safetensors: {reason}; name a readable safetensors file"
        ) from None
    units = []
    for key, tensor in sorted(tensors.items()):
        kind, _, name = key.partition("/")
        if kind not in ("weights", "changes", "gradients") or not name:
            kind, name = "weights", key
        if tensor.is_floating_point() and tensor.numel():
            rows = kind == "gradients" and tensor.dim() > 1
            units.append(Unit(kind, name, tensor.float().flatten(int(rows))))
    if not units:
        raise Refusal(f"{path}: has no tensor of floating-point numbers; give a file of weights or gradients")
    ranks = max((len(unit.x) for unit in units if unit.x.dim() > 1), default=1)
    try:
        nodes, ranks_per_node = (
            _positive(metadata.get(name, default))
            for name, default in (("nodes", 1), ("ranks_per_node", ranks))
        )
    except ValueError:
        raise Refusal(
            f"{path}: nodes or ranks_per_node in the file's metadata is not a whole number above 0; write the file "
            "again with zeropp snapshot"
        ) from None
    return units, (nodes, ranks_per_node)


def _positive(number: str | int) -> int:
    if not 0 < int(number) < 2**31:
        raise ValueError(number)
    return int(number)


def measure(units: Sequence[Unit], sizes: Sizes, texts: Sequence[str]) -> pd.DataFrame:
    """Encode and decode each unit with each codec, and return a table of the errors and times.

    Args:
        units: The units, of all kinds and steps.
        sizes: The number of nodes, and the number of ranks per node, that the gradients come from.
        texts: Text forms of the codecs.

    Returns:
        A row for each codec, unit and step, with these columns:

        - ``kind`` of the values, ``codec`` as text, and name of the ``unit`` without its step;
        - ``exact``, ``decoded`` and ``error``: the sums of squares of the exact values, of the decoded values, and of
          their differences;
        - ``product``: the sum of the products of exact and decoded values;
        - ``elements``: the number of elements of the unit's tensor, without the zeros that are appended for the codec;
        - ``bytes``: bytes of the encoded unit.  For gradients on one node, these are the bytes that one rank sends.
          For gradients on several nodes, these are the bytes that all ranks of one node together send in the second
          hop;
        - ``seconds``: how long encoding and decoding took, for all ranks and hops together.
    """
    torch.set_num_threads(1)  # ranks have one thread too, and small rows are slower with several
    return pd.DataFrame(
        _measure_unit(parse(text), unit, sizes, number)
        for kind in dict.fromkeys(unit.kind for unit in units)
        for text in texts
        for number, unit in enumerate(unit for unit in units if unit.kind == kind)
    )


def rank_codecs(rows: pd.DataFrame) -> pd.DataFrame:
    """Add up the rows of :func:`measure` for each codec, and return the codecs ranked by error.

    There is a row for each kind of values and each codec, sorted by kind and then by error, the least error first.  A
    row has the sums of the columns of :func:`measure` over all units and steps, and these columns:

    - ``bits``: ``8 * bytes / elements``, the mean bits of an element on the wire;
    - ``vnmse``: ``error / exact``;
    - ``bias``: ``product / exact - 1``, which is 0 for an unbiased codec and negative if decoded values are too small;
    - ``cosine``: cosine of the angle between decoded and exact values;
    - ``gb_per_second``: GB of ``elements`` in fp32, divided by ``seconds``.  For gradients, an element counts once,
      although ``seconds`` is the time of all ranks and hops.
    """
    sums = rows.groupby(["kind", "codec"], sort=False, as_index=False).sum(numeric_only=True)
    sums["bits"] = 8 * sums["bytes"] / sums["elements"]
    sums["vnmse"] = sums["error"] / sums["exact"]
    sums["bias"] = sums["product"] / sums["exact"] - 1
    sums["cosine"] = sums["product"] / (sums["exact"] * sums["decoded"]) ** 0.5
    sums["gb_per_second"] = 4e-9 * sums["elements"] / sums["seconds"]
    return sums.sort_values(["kind", "vnmse"], kind="stable", ignore_index=True)


def _measure_unit(codec: Codec, unit: Unit, sizes: Sizes, number: int) -> dict[str, Any]:
    """Encode and decode one unit with one codec, and return a row of the table that :func:`measure` returns.

    Args:
        codec: The codec.
        unit: The weights, changes of weights or gradients to encode.
        sizes: The number of nodes, and the number of ranks per node, over which a gradient is reduced.
        number: Number of the unit, on which a stochastic codec's random bits depend.
    """
    elements, exact = unit.x.shape[-1], unit.x.double()
    if unit.x.dim() > 1:
        exact = exact.mean(0)
        padded, nbytes, seconds = _reduce(codec, unit.x, sizes, number)
    else:
        padded, nbytes, seconds = _send(codec, _cut(codec, unit.x, 1), number, 0)
    decoded = padded.flatten()[:elements].double()
    return {
        "kind": unit.kind,
        "codec": str(codec),
        "unit": unit.name.partition("@")[0],
        "exact": float(exact.square().sum()),
        "decoded": float(decoded.square().sum()),
        "product": float((decoded * exact).sum()),
        "error": float((decoded - exact).square().sum()),
        "bytes": nbytes,
        "elements": elements,
        "seconds": seconds,
    }


def _cut(codec: Codec, values: Tensor, parts: int) -> Tensor:
    """Pad ``values`` (..., P) with zeros, and return them cut into ``parts`` equal parts: (..., parts, S).

    S is a multiple of the codec's block size.
    """
    padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % (common_grain(codec) * parts)))
    return padded.view(*values.shape[:-1], parts, -1)


def _send(codec: Codec, x: Tensor, number: int, hop: int) -> Sent:
    """Encode and decode ``x`` (..., parts, S) as for sending; return the decoded elements, bytes and seconds.

    The leading axes ``...`` run over the senders.  Each sender sends ``parts`` rows of S elements, and each row is
    encoded by itself.  The returned bytes are those of one sender, as the mean over all senders.  A stochastic codec's
    random bits depend on ``number`` (of the unit) and ``hop``.
    """
    frames = torch.empty((*x.shape[:-1], codec.frame_bytes(x.shape[-1])), dtype=torch.uint8)
    out, noise = torch.empty_like(x), None
    if codec.stochastic:
        strides = tuple(math.prod(x.shape[axis + 1 :]) for axis in range(x.dim() - 1))
        noise = Key(0, number, 0, "snapshot", "gradients", hop).noise(0, strides)
    began = time.perf_counter()
    ops.encode(codec, x, frames, noise=noise)
    ops.decode(codec, frames, out)
    seconds = time.perf_counter() - began
    senders = math.prod(x.shape[:-2])
    return out, used_bytes(codec, frames) // senders, seconds


def _reduce(codec: Codec, gradients: Tensor, sizes: Sizes, number: int) -> Sent:
    """Average gradients (ranks, P) with a codec, in two hops, or in one hop if all ranks share a node.

    If ``sizes`` (nodes, ranks per node) does not have as many ranks as there are gradients, all ranks count as ranks of
    one node.  A stochastic codec's random bits depend on ``number`` (of the unit) and on the hop.

    Returns:
        - mean: (parts, S) the decoded mean, where parts is the number of ranks;
        - bytes: with one hop, the bytes that one rank sends; with two hops, the bytes that all ranks of a node together
          send in the second hop;
        - seconds: the time of encoding and decoding, in all hops.
    """
    nodes, ranks = sizes if math.prod(sizes) == len(gradients) else (1, len(gradients))
    rows = _cut(codec, gradients.view(nodes, ranks, -1), nodes * ranks)  # (nodes, ranks, parts, S)
    decoded, nbytes, seconds = _send(codec, rows, number, 0)
    sums, second_hop = decoded.sum(1), 0.0  # (nodes, parts, S)
    if nodes > 1:
        sums, nbytes, second_hop = _send(codec, sums, number, 1)
    return sums.sum(0) / len(gradients), nbytes, seconds + second_hop


def lossless_bits(units: Sequence[Unit], kind: str) -> float:
    """Return the mean bits of a bf16 element if an ideal coder compresses the exponents without loss.

    The elements are all values of one ``kind``, such as ``weights``.  An element takes 8 bits for sign and mantissa,
    plus the entropy of the exponents (the approach of ZipCCL, arXiv 2604.27844).  Zeros are left out, since they may be
    padding.
    """
    values = torch.cat([unit.x[unit.x != 0] for unit in units if unit.kind == kind]).to(torch.bfloat16)
    exponents = (values.view(torch.int16).to(torch.int32) >> 7) & 0xFF
    counts = torch.bincount(exponents)
    share = counts[counts > 0].double() / max(1, len(values))
    return 8 - float((share * share.log2()).sum())


def budget_lines(rows: pd.DataFrame, bits: float) -> Iterator[str]:
    """Yield lines of text that say which codecs are best if an element may take at most ``bits`` bits on average.

    ``rows`` are rows of :func:`measure`.  There are several lines for each kind of values.  The first line compares two
    errors: the error if a codec is chosen for each unit (:func:`choose_codecs`), and the error of the best single codec
    for all units.  Then there is a line for each unit (a set of parameters that are sent together), which names the
    codec that was chosen for the unit.
    """
    for kind, group in rows.groupby("kind"):
        (chosen, cost), codecs = choose_codecs(group, bits), rank_codecs(group)
        first, alone = codecs.iloc[0], "no single codec fits"
        for best in codecs[codecs["bits"] <= bits].head(1).itertuples():
            alone = f"{best.codec} for all units has {best.vnmse:.3g}"
        vnmse, spent = cost.error / first["exact"], 8 * cost.bytes / first["elements"]
        yield f"{kind} within {bits:g} bits: vNMSE {vnmse:.3g} at {spent:.2f} bits; {alone}."
        yield from (f"  {name}: {codec}" for name, codec in chosen.items())


def choose_codecs(rows: pd.DataFrame, bits: float) -> tuple[dict[str, str], Cost]:
    """Choose a codec for each unit, so that all units together stay within a budget of bytes and have a small error.

    A unit is a set of parameters that are sent together.  :func:`impl.plan.bit_budget.choose` makes the choice.

    Args:
        rows: Rows of :func:`measure` for one kind of values.
        bits: The budget: bits that an element may take on average over all units.

    Returns:
        (chosen, cost): a dict from each unit's name to the unit's codec, and the bytes and squared errors of all units
        together.

    Raises:
        Refusal: If even the codecs with the fewest bytes take more than the budget.
    """
    costs: dict[str, dict[str, Cost]] = {}
    sums = rows.groupby(["unit", "codec"], sort=False)[["bytes", "error"]].sum()
    for (unit, codec), (nbytes, error) in zip(sums.index, sums.to_numpy().tolist(), strict=True):
        costs.setdefault(unit, {})[codec] = Cost(int(nbytes), error)
    choices, elements = list(costs.values()), rows["elements"].sum() / rows["codec"].nunique()
    try:
        chosen = choose(choices, bytes_within(bits, elements))
    except BudgetError as error:
        least = bits_for(error.needed, elements)
        raise Refusal(
            f"--bits {bits:g}: even with the smallest codec for each unit, {least:g} bits are needed for each element "
            f"of {rows['kind'].iloc[0]}: give --bits {least:g} or more, or name a codec of fewer bits with --codec"
        ) from None
    return dict(zip(costs, chosen, strict=True)), total(choices, chosen)


class Agreement(NamedTuple):
    """The rank correlation between the errors of codecs and the losses of trials with these codecs."""

    correlation: float  # Spearman's rank correlation
    low: float  # lower end of the 95 % confidence interval of the correlation, from resampled seeds
    high: float  # upper end of this interval
    codecs: int  # number of codecs that were compared
    seeds: int  # number of seeds that all of these codecs have


def agreement(codecs: pd.DataFrame, results: Path) -> Agreement:
    """Return the rank correlation between the errors of codecs on gradients and the losses of training with them.

    The losses are the last validation losses in a suite's records.  Records whose gradients have different codecs in
    the two hops are left out.  The other records are divided into sets.  Within a set, records have the same setting
    (model, batch, ranks, link and so on) and strategy.  Their policies have the same changes, except for the codec of
    the gradients.  Only one set is used: the set that has the most codecs of ``codecs``.  The confidence interval comes
    from 2000 bootstrap samples of the seeds.

    Args:
        codecs: Rows of :func:`rank_codecs`.
        results: The folder or archive of the suite's records.

    Raises:
        Refusal: If the set that is used has fewer than five codecs of ``codecs``, or if no seed has losses for all of
            these codecs.
    """
    from scipy import stats

    errors = codecs[codecs["kind"] == "gradients"].set_index("codec")["vnmse"]
    with TemporaryDirectory() as folder:
        unpacked = unpack(results, Path(folder)) if results.name.endswith(SUFFIX) else results
        losses = pd.DataFrame(_losses(read_valid(unpacked)[0]), columns=["set", "codec", "seed", "loss"])
    tables = [  # (codecs, seeds) each
        group.pivot_table("loss", "codec", "seed", "last").dropna(axis=1)
        for _, group in losses[losses["codec"].isin(errors.index)].groupby("set")
    ]
    table = max(tables, key=len, default=pd.DataFrame())  # (codecs, seeds)
    count, seeds = table.shape
    if count < _FEWEST or not seeds:
        raise Refusal(
            f"--losses {results}: a rank correlation needs at least {_FEWEST} of the measured codecs, and a seed with "
            f"losses for all of them; measured codecs in these results: {count}, seeds with losses for all of these "
            f"codecs: {seeds}; give results of more codecs or seeds, or leave --losses out"
        )
    drawn = np.random.default_rng(0).integers(seeds, size=(_RESAMPLED, seeds))
    correlation, *resampled = [
        float(stats.spearmanr(errors[table.index], table.to_numpy()[:, columns].mean(1)).statistic)
        for columns in ([*range(seeds)], *drawn)
    ]
    low, high = np.quantile(resampled, [0.025, 0.975])
    return Agreement(correlation, float(low), float(high), count, seeds)


def _losses(records: Sequence[Record]) -> Iterator[tuple[str, str, int, float]]:
    """Yield (set, codec of the gradients, seed, last validation loss) for each record with a validation loss.

    The set is a text that is equal for records whose losses may be compared.  Such records have the same setting
    (model, batch, ranks, link and so on) and strategy, and their policies have the same changes, except for the codec
    of the gradients.  Three kinds of records are left out: records of failed trials, records of controls (trials with a
    deliberate fault), and records whose gradients have different codecs in the two hops.
    """
    for record in records:
        if record.failure is not None or not record.validations:
            continue
        trial = Trial.from_canonical(record.trial)
        policy = trial.resolved_policy()
        if policy is not None and len({*policy.gradients}) == 1 and trial.control is None:
            changes = trial.policy.model_dump(exclude={"gradients", "align"}, exclude_defaults=True)
            kind = f"{setting_of(trial, 'seed', 'repeat')} {trial.strategy} {changes}"
            yield kind, str(policy.gradients[0]), trial.seed, record.validations[-1].loss
