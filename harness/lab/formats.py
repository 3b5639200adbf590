"""``zeropp bench formats``: ranks codecs by their errors on a snapshot, without training.

Weights and their changes go through a codec once.  Gradients go the way of a two-hop reduction: each rank's
is encoded and summed in fp32 inside its node, that sum encoded and summed over nodes, and divided by the
ranks; the error is of that mean against the exact one.  Of a file that is no snapshot of ours each tensor is
a unit of weights, one whose name begins with ``gradients/`` has a row for each rank, of one node.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from harness.errors import Refusal
from harness.records.archive import SUFFIX, unpack
from harness.records.record import readable
from harness.suites.trial import Trial
from impl import ops
from impl.codecs.codec import Codec, common_grain, parse
from impl.codecs.rounding_noise import Key
from impl.plan.bit_budget import Cost, choose, total

CODECS: Final = (
    "bf16", "int8:128", "fp8e4m3:128", "mxfp8", "mxfp6e2m3", "mxfp6e3m2", "int6:128", "int4:128",
    "int4:128:clip", "int4:128:asym", "int4:128:stochastic", "int4:128:hadamard32", "nvfp4", "mxfp4", "nf4",
    "spike3", "int3:128", "spike2", "int2:128", "sign1",
)  # fmt: skip
_RESAMPLED: Final = 2000
_FEWEST: Final = 5  # codecs with a loss, for a rank correlation
Sizes = tuple[int, int]  # nodes, and ranks of each


@dataclass(frozen=True, slots=True)
class Unit:
    """What a snapshot has of one unit at one step: weights or changes (P,), or gradients (ranks, P)."""

    kind: str
    name: str
    values: Tensor


@dataclass(slots=True)
class Found:
    """What one codec does to all units of a kind."""

    kind: str
    codec: str
    # of the exact values, the decoded ones, their product, and the error, summed
    squares: list[float] = field(default_factory=lambda: [0.0] * 4)
    cost: dict[str, Cost] = field(default_factory=dict)  # by unit, all its steps together
    seconds: float = 0.0  # of encoding and decoding
    elements: int = 0  # that were encoded

    @property
    def vnmse(self) -> float:
        """Squared error over squared values."""
        return self.squares[3] / self.squares[0] if self.squares[0] else math.nan

    @property
    def bias(self) -> float:
        """How far the decoded values are shrunk or stretched: their projection on the exact ones, less 1."""
        return self.squares[2] / self.squares[0] - 1 if self.squares[0] else math.nan

    @property
    def cosine(self) -> float:
        """Of decoded and exact values."""
        length = math.sqrt(self.squares[0] * self.squares[1])
        return self.squares[2] / length if length else math.nan

    @property
    def bits(self) -> float:
        """Bits that an element takes on the wire, scales and padding included."""
        return 8 * sum(one.bytes for one in self.cost.values()) / self.elements if self.elements else math.nan


def units_of(path: Path) -> tuple[list[Unit], Sizes]:
    """What a file holds, and on how many nodes and ranks its gradients were made.

    Raises:
        Refusal: if it cannot be read, or holds no floating-point tensor.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            told: Mapping[str, str] = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    except (SafetensorError, OSError) as error:
        raise Refusal(f"{path}: no safetensors file that can be read: {error}") from None
    found = []
    for name, tensor in sorted(tensors.items()):
        kind, _, rest = name.partition("/")
        if kind not in ("weights", "changes", "gradients") or not rest:
            kind, rest = "weights", name
        if tensor.is_floating_point() and tensor.numel():
            rows = kind == "gradients" and tensor.dim() > 1
            found.append(Unit(kind, rest, tensor.float().flatten(int(rows))))
    if not found:
        raise Refusal(f"{path}: no tensor of floating-point numbers")
    ranks = max((len(one.values) for one in found if one.values.dim() > 1), default=1)
    nodes = int(told.get("nodes", "1"))
    return found, (nodes, int(told.get("ranks_per_node", str(ranks))))


def measure(units: Sequence[Unit], sizes: Sizes, texts: Sequence[str]) -> list[Found]:
    """The errors of each codec on each kind of values, the least error of a kind first."""
    torch.set_num_threads(1)  # as ranks have; operations on small rows are slower with more
    found = [
        _measured(kind, parse(text), [unit for unit in units if unit.kind == kind], sizes)
        for kind in dict.fromkeys(unit.kind for unit in units)
        for text in texts
    ]
    return sorted(found, key=lambda one: (one.kind, one.vnmse))


def _measured(kind: str, codec: Codec, units: Sequence[Unit], sizes: Sizes) -> Found:
    found = Found(kind, str(codec))
    for number, unit in enumerate(units):
        gradients = unit.values.dim() > 1
        exact = unit.values.double().mean(0) if gradients else unit.values.double()
        elements = unit.values.shape[-1]
        if gradients:
            decoded, nbytes = _reduced(codec, unit.values, sizes, number, found)
        else:
            decoded, nbytes = _through(codec, _cut(codec, unit.values, 1), number, 0, found)
            decoded = decoded.flatten()[:elements]
        wide = decoded.double()
        error = float((wide - exact).square().sum())
        sums = (exact.square().sum(), wide.square().sum(), (wide * exact).sum())
        found.squares = [a + b for a, b in zip(found.squares, (*map(float, sums), error), strict=True)]
        found.elements += elements
        name = unit.name.partition("@")[0]
        old = found.cost.get(name, Cost(0, 0.0))
        found.cost[name] = Cost(old.bytes + nbytes, old.error + error)
    return found


def _cut(codec: Codec, values: Tensor, parts: int) -> Tensor:
    """(..., parts, S) of (..., P), padded with zeros."""
    grain = common_grain(codec) * parts
    padded = -(-values.shape[-1] // grain) * grain
    wide = torch.nn.functional.pad(values, (0, padded - values.shape[-1]))
    return wide.view(*values.shape[:-1], parts, padded // parts)


def _through(codec: Codec, x: Tensor, number: int, hop: int, found: Found) -> tuple[Tensor, int]:
    """What ``x`` (..., S) decodes to, and the bytes of one row's frames times its parts."""
    frames = torch.empty((*x.shape[:-1], codec.frame_bytes(x.shape[-1])), dtype=torch.uint8)
    out, noise = torch.empty_like(x), None
    if codec.stochastic:
        strides = tuple(math.prod(x.shape[axis + 1 :]) for axis in range(x.dim() - 1))
        noise = Key(0, number, 0, "snapshot", "gradients", hop).noise(0, strides)
    began = time.perf_counter()
    ops.encode(codec, x, frames, noise=noise)
    ops.decode(codec, frames, out)
    found.seconds += time.perf_counter() - began
    return out, frames.shape[-1] * x.shape[-2]


def _reduced(codec: Codec, gradients: Tensor, sizes: Sizes, number: int, found: Found) -> tuple[Tensor, int]:
    """(P,) the mean of gradients (ranks, P) by two hops, and the bytes of a message of the second."""
    nodes, ranks = sizes if math.prod(sizes) == len(gradients) else (1, len(gradients))
    rows = _cut(codec, gradients.view(nodes, ranks, -1), nodes * ranks)  # (nodes, ranks, parts, S)
    first, nbytes = _through(codec, rows, number, 0, found)
    sums = first.sum(1)  # (nodes, parts, S)
    if nodes > 1:
        sums, nbytes = _through(codec, sums, number, 1, found)
    mean = sums.sum(0).flatten()[: gradients.shape[-1]] / len(gradients)
    return mean, nbytes


def lossless_bits(units: Sequence[Unit], kind: str) -> float:
    """Bits of an element in bf16 whose exponents are coded without loss: 8, and the entropy of the exponent.

    What an ideal coder would send (as ZipCCL, 2604.27844); zeros that pad units are left out.
    """
    counts = torch.zeros(256, dtype=torch.int64)
    for unit in units:
        if unit.kind == kind:
            values = unit.values[unit.values != 0].to(torch.bfloat16)
            exponents = (values.view(torch.int16).to(torch.int32) >> 7) & 0xFF
            counts += torch.bincount(exponents, minlength=256)
    share = counts[counts > 0].double() / max(1, int(counts.sum()))
    return 8 - float((share * share.log2()).sum())


def budgets(found: Sequence[Found], bits: float) -> Iterator[str]:
    """For each kind what the codecs by unit are whose errors are least in sum within ``bits`` an element,
    beside the best single codec within them, in lines; see :func:`within`.
    """
    for kind in dict.fromkeys(one.kind for one in found):
        mine = [one for one in found if one.kind == kind]
        chosen, cost = within(mine, bits)
        uniform = next((one for one in mine if one.bits <= bits), None)  # the first errs least
        alone = f"{uniform.codec} alone {uniform.vnmse:.3g}" if uniform else "no codec alone fits"
        vnmse, spent = cost.error / mine[0].squares[0], 8 * cost.bytes / mine[0].elements
        yield f"{kind} within {bits:g} bits: vNMSE {vnmse:.3g} at {spent:.2f}, {alone}."
        yield from (f"  {name}: {codec}" for name, codec in zip(mine[0].cost, chosen, strict=True))


def within(mine: Sequence[Found], bits: float) -> tuple[list[str], Cost]:
    """Of one kind the codec of each unit, and what all of them cost.

    Raises:
        Refusal: if even the smallest codecs take more than ``bits`` an element.
    """
    parts = [{one.codec: one.cost[name] for one in mine} for name in mine[0].cost]
    try:
        chosen = choose(parts, int(bits * mine[0].elements / 8))
    except ValueError as error:
        raise Refusal(f"--bits {bits:g}, {mine[0].kind}: {error}") from None
    return chosen, total(parts, chosen)


class Agreement(NamedTuple):
    """How well errors rank codecs as losses do: Spearman's correlation, with the ends over seeds."""

    correlation: float
    low: float
    high: float
    codecs: int
    seeds: int


def agreement(found: Sequence[Found], results: Path) -> Agreement:
    """Compare the errors of gradients with the losses of a suite's records, in a folder or an archive.

    Records count that differ in the codec of gradients alone, one for both hops; of several such sets the
    largest. The interval is of 2000 draws of the seeds.

    Raises:
        Refusal: if fewer than five codecs have both.
    """
    from scipy import stats

    errors = {one.codec: one.vnmse for one in found if one.kind == "gradients"}
    sets: dict[str, dict[str, dict[int, float]]] = {}
    with TemporaryDirectory() as folder:
        there = unpack(results, Path(folder)) if results.name.endswith(SUFFIX) else results
        records = readable(there)[0]
    for record in records:
        if record.failure is not None or not record.validations:
            continue
        trial = Trial.from_canonical(record.trial)
        policy = trial.resolved_policy()
        codec = "" if policy is None or len({*policy.gradients}) > 1 else str(policy.gradients[0])
        if policy is None or codec not in errors or trial.control is not None:
            continue
        changes = trial.policy.model_dump(exclude={"gradients", "align"}, exclude_defaults=True)
        key = f"{trial.strategy} {changes} {trial.cluster.rate}"
        losses = sets.setdefault(key, {}).setdefault(codec, {})
        losses[trial.seed] = record.validations[-1].loss
    best = max(sets.values(), key=len, default={})
    seeds = sorted(set.intersection(*(set(one) for one in best.values()))) if best else []
    if len(best) < _FEWEST or not seeds:
        raise Refusal(f"{results}: losses of {len(best)} measured codecs; expected {_FEWEST} or more")
    table = np.array([[best[codec][seed] for seed in seeds] for codec in best])  # (codecs, seeds)
    order = [errors[codec] for codec in best]

    drawn = np.random.default_rng(0).integers(len(seeds), size=(_RESAMPLED, len(seeds)))
    samples = [range(len(seeds)), *drawn]
    whole, *rest = [stats.spearmanr(order, table[:, one].mean(1)).statistic for one in samples]
    low, high = np.quantile(rest, [0.025, 0.975])
    return Agreement(float(whole), float(low), float(high), len(best), len(seeds))
