"""Loads a results folder into tidy tables; the only reader of records in ``report``.

One row is one thing measured; nothing is averaged here.  Records of different machines or code
are not put into one table unless asked (``Frames.pools`` then has several entries).
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pandas as pd
from pydantic import ValidationError

from harness.records.record import LedgerRow, Record, RecordError, read_all
from harness.suites.trial import Trial
from report.data.contender import label_of, order_of, shared_changes
from report.data.text import plain

# What may differ between trials of one cell: who ran, and which repetition it was.
_NOT_OF_A_CELL: Final = (
    "strategy", "policy", "deepspeed_config", "seed", "repeat", "timeout_seconds", "measure_quantisation",
    "validate_every",
)  # fmt: skip
_ALWAYS_TOLD: Final = ("cluster.nodes", "cluster.ranks_per_node", "cluster.rate", "tokens_per_rank")

TRIALS: Final = (
    "id", "suite", "order", "started", "pool", "strategy", "contender", "place", "cell", "where",
    "seed", "repeat", "nodes", "ranks_per_node", "world", "processes", "tokens_per_rank", "sequence",
    "accumulation", "model", "rate_mbit", "achieved_mbit", "weights", "gradients_local",
    "gradients_node", "secondary", "parameters", "units", "padded", "padding_share", "reference_loss",
    "predicted_equal", "link_kind", "backend", "kernels", "kernels_warning", "processors", "corpus",
    "corpus_sha256",
    "others_share", "steal_share",
)  # fmt: skip
STEPS: Final = (
    "id", "rank", "node", "local", "index", "warmup", "total", "forward", "backward", "optimizer",
    "exposed_forward", "exposed_backward", "loss", "gradient_norm", "cpu_seconds",
)  # fmt: skip
BYTES: Final = (
    "id", "source", "rank", "node", "phase", "purpose", "link", "hop", "bytes", "messages",
)  # fmt: skip
INTERFACES: Final = ("id", "node", "tx_bytes", "tx_packets", "header_bytes")
MEMORY: Final = ("id", "rank", "source", "part", "bytes")
TOKENS: Final = (
    "id", "rank", "step", "warmup", "index", "seconds", "exposed", "inter_bytes", "intra_bytes",
)  # fmt: skip
VALIDATIONS: Final = ("id", "step", "loss", "train_seconds", "inter_bytes")
QUANTISATION: Final = ("id", "purpose", "unit", "codec", "vnmse", "largest")
LINKS: Final = ("id", "order", "kind", "why", "when", "requested_mbit", "achieved_mbit", "message_bytes")
FAILURES: Final = (
    "id", "contender", "where", "repeat", "seed", "kind", "message", "log", "strategy", "place", "cell",
    "parameters", "nodes", "ranks_per_node",
)  # fmt: skip
FACTS: Final = ("pool", "records", "fact", "value")


class ReportError(RecordError):
    """Records cannot be reported together, or there are none."""


@dataclass(frozen=True)
class Frames:
    """A results folder as tables; columns are the constants above, units in their names.

    Attributes:
        suite: name of the suite, or names joined by a comma.
        questions: of the suites, where records hold them.
        pools: hashes of machine and code, one per pool.
        left_out: failures of another pool, without measurements.
        trials: one row per finished trial that trained; ``processors`` are the CPUs that all its ranks
            share, None on GPUs and if ranks may run on several machines; ``others_share`` and
            ``steal_share`` are the parts of their time that other programs and the hypervisor took.
        generators: the same of those that generated; their raw values are in ``tokens`` alone.
        steps: one row per rank and optimizer step; seconds.
        bytes: sent over the timed steps, by source (``ledger`` or ``predicted``), rank, phase,
            purpose, link and hop.
        interfaces: one row per node: what its network interface counted over the timed steps, and
            the bytes of a packet's headers where the link states them.
        memory: bytes by part, source (``engine``, ``formula`` or ``process``; ``copied`` and
            ``copied_formula`` of a step, by direction and purpose) and rank.
        tokens: one row per rank and decoded token; seconds, and bytes that the rank sent for it.
        validations: loss on the validation split.
        quantisation: error of a codec on a unit.
        links: one row per measurement of a link, ``when`` it was ``calibrated`` or ``probed``.
        failures: one row per trial without a result.
        facts: machine, code and what ran, one row per pool and distinct value.
        ran: the whole trial by id.
        shared: changes that all policies share, which names leave out.
        units: name, elements and padded elements of each unit, by id.
        unit_bytes: what the busiest node sent to other nodes over the timed steps, by id, then by unit,
            phase and purpose (ledger).
    """

    suite: str
    questions: tuple[str, ...]
    pools: tuple[str, ...]
    left_out: int
    trials: pd.DataFrame
    generators: pd.DataFrame
    steps: pd.DataFrame
    bytes: pd.DataFrame
    interfaces: pd.DataFrame
    memory: pd.DataFrame
    tokens: pd.DataFrame
    validations: pd.DataFrame
    quantisation: pd.DataFrame
    links: pd.DataFrame
    failures: pd.DataFrame
    facts: pd.DataFrame
    ran: dict[str, Trial]
    shared: dict[str, str]
    units: dict[str, list[tuple[str, int, int]]]
    unit_bytes: dict[str, dict[tuple[str, str, str], int]]


def load(results: Path, *, across_pools: bool = False) -> Frames:
    """Read a results folder.

    Args:
        results: the folder that holds ``<id>.json``.
        across_pools: put records of different machines or code side by side.

    Raises:
        ReportError: if there is no record, or there are several pools and that was not asked for.
        RecordError: for a file that is not a record of this schema.
    """
    if not results.is_dir():
        raise ReportError(f"{results}: no such folder; `zeropp run SUITE` makes one")
    records = read_all(results)
    if not records:
        raise ReportError(f"{results}: no records; `zeropp run SUITE` writes them")
    return frames_of(records, across_pools=across_pools)


def frames_of(records: list[Record], *, across_pools: bool = False) -> Frames:
    """Tables of ``records``; see :func:`load`."""
    found = len(records)
    if not across_pools:
        records = _without_old_failures(records)
        _check_one_pool(records)
    trials = {record.id: _trial(record) for record in records}
    shared = shared_changes(list(trials.values()))
    naming = _Naming(shared, _varying([_flat(trial.canonical()) for trial in trials.values()]))
    ended = [record for record in records if record.failure is None]
    finished = [record for record in ended if trials[record.id].workload == "train"]
    generated = [record for record in ended if trials[record.id].workload == "generate"]
    return Frames(
        suite=", ".join(sorted({record.suite for record in records})),
        questions=tuple(sorted({question for record in records if (question := _question(record))})),
        pools=tuple(sorted({record.pool for record in records})),
        left_out=found - len(records),
        trials=_frame([_trial_row(r, trials[r.id], naming) for r in finished], TRIALS),
        generators=_frame([_trial_row(r, trials[r.id], naming) for r in generated], TRIALS),
        steps=_frame([row for r in finished for row in _step_rows(r)], STEPS),
        bytes=_bytes_frame(finished),
        interfaces=_frame([row for r in finished for row in _interface_rows(r)], INTERFACES),
        memory=_frame([row for r in finished for row in _memory_rows(r)], MEMORY),
        tokens=_frame([row for r in generated for row in _token_rows(r)], TOKENS),
        validations=_frame(
            [{"id": r.id, **v.model_dump()} for r in finished for v in r.validations], VALIDATIONS
        ),
        quantisation=_frame(
            [{"id": r.id, **q.model_dump()} for r in finished for q in r.quantisation], QUANTISATION
        ),
        links=_frame([row for r in ended for row in _link_rows(r)], LINKS),
        failures=_frame(
            [_failure_row(r, trials[r.id], naming) for r in records if r.failure is not None], FAILURES
        ),
        facts=_facts_frame(records),
        ran=trials,
        shared=shared,
        units={r.id: r.units for r in ended},
        unit_bytes={r.id: _unit_bytes(r) for r in finished},
    )


def _question(record: Record) -> str:
    """The question of the record's suite; empty if the record has none."""
    return record.question


def _frame(rows: list[dict[str, Any]], columns: Iterable[str]) -> pd.DataFrame:
    """Rows as a frame that has all columns even without rows."""
    return pd.DataFrame(rows, columns=list(columns))


def _trial(record: Record) -> Trial:
    """Parse the trial of a record.

    Raises:
        ReportError: if this version cannot parse it.
    """
    try:
        return Trial.from_canonical(record.trial)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ReportError(
            f"record {record.id}: trial.{where}: {first['msg']}; use the version that wrote it"
        ) from error


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _cell_fields(flat: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in flat.items() if key.split(".")[0] not in _NOT_OF_A_CELL}


def _varying(trials: list[dict[str, Any]]) -> tuple[str, ...]:
    """Fields of a cell that differ between trials, beside those that are always printed."""
    cells = [_cell_fields(flat) for flat in trials]
    keys = sorted({key for cell in cells for key in cell})
    return tuple(
        key
        for key in keys
        if key not in _ALWAYS_TOLD and len({json.dumps(cell.get(key), sort_keys=True) for cell in cells}) > 1
    )


def groups(data: pd.DataFrame, keys: list[str]) -> list[tuple[tuple[Any, ...], pd.DataFrame]]:
    """Rows by equal ``keys``, in the order of first appearance, with the keys' values."""
    first = data.drop_duplicates(keys)[keys].astype(object)
    number = data.groupby(keys, sort=False, dropna=False).ngroup()
    return [(tuple(key), data[number == place]) for place, key in enumerate(first.to_numpy())]


def rate_text(mbit: float | None) -> str:
    """``50 Mbit/s``, ``1.6 Gbit/s`` or ``unshaped``."""
    if mbit is None or pd.isna(mbit):
        return "unshaped"
    return f"{mbit / 1000:g} Gbit/s" if mbit >= 1000 else f"{mbit:g} Mbit/s"


@dataclass(frozen=True, slots=True)
class _Naming:
    """Names of contenders and cells in one folder.

    Attributes:
        shared: policy changes that all have.
        varying: fields of cells that differ, beside those that are always printed.
    """

    shared: Mapping[str, str]
    varying: tuple[str, ...]

    def contender(self, trial: Trial) -> str:
        return label_of(trial, self.shared)

    def cell(self, trial: Trial) -> tuple[str, str]:
        """Hash and description of a trial's cell: every field but strategy, policy, seed and repeat."""
        cell = _cell_fields(_flat(trial.canonical()))
        text = json.dumps(cell, sort_keys=True, separators=(",", ":"))
        told = [
            f"{trial.topology()} ranks",
            rate_text(trial.cluster.rate),
            f"{trial.tokens_per_rank} tokens/rank",
            *(f"{_spoken(key)} {plain(cell.get(key))}" for key in self.varying),
        ]
        return hashlib.sha256(text.encode()).hexdigest()[:12], ", ".join(told)


def _spoken(key: str) -> str:
    """A field's name without its table: ``model`` for ``model.name``, ``steps``."""
    return key.removesuffix(".name").rpartition(".")[2]


def achieved_mbit(record: Record) -> float | None:
    """Achieved rate of a record's link: median of the probes, else of the calibration; Mbit/s."""
    if record.link is None:
        return None
    values = record.link.probed_mbit or record.link.calibrated_mbit
    return statistics.median(values) if values else None


def _trial_row(record: Record, trial: Trial, naming: _Naming) -> dict[str, Any]:
    topology = trial.topology()
    policy = trial.resolved_policy()
    cell, where = naming.cell(trial)
    return {
        "id": record.id,
        "suite": record.suite,
        "order": record.order,
        "started": record.started,
        "pool": record.pool,
        "strategy": trial.strategy,
        "contender": naming.contender(trial),
        "place": order_of(trial.strategy),
        "cell": cell,
        "where": where,
        "seed": trial.seed,
        "repeat": trial.repeat,
        "nodes": topology.nodes,
        "ranks_per_node": topology.ranks_per_node,
        "world": topology.world,
        "processes": len(record.ranks),
        "tokens_per_rank": trial.tokens_per_rank,
        "sequence": trial.sequence,
        "accumulation": trial.accumulation,
        "model": trial.model.name,
        "rate_mbit": trial.cluster.rate,
        "achieved_mbit": achieved_mbit(record),
        "weights": str(policy.weights) if policy else "",
        "gradients_local": str(policy.gradients[0]) if policy else "",
        "gradients_node": str(policy.gradients[1]) if policy else "",
        "secondary": policy.secondary_ranks(topology) if policy else 0,
        "parameters": record.parameters,
        "units": len(record.units),
        "padded": sum(padded for _, _, padded in record.units),
        "padding_share": record.padding,
        "reference_loss": record.reference_loss,
        "predicted_equal": record.predicted.equal if record.predicted else None,
        "link_kind": record.link.kind if record.link else "",
        "backend": str(record.ran.get("backend", "")),
        "kernels": str(record.ran.get("kernels", "")),
        "kernels_warning": plain(record.ran.get("kernels_warning", ""), 300),
        "processors": _processors(record, trial),
        "corpus": plain(trial.corpus),
        "corpus_sha256": str(record.ran.get("corpus_sha256", "")),
        **_taken(record),
    }


def _taken(record: Record) -> dict[str, float | None]:
    """Parts of the CPU time that others took over the timed steps; None if not on record."""
    use = record.processor_use
    if use is None:
        return {"others_share": None, "steal_share": None}
    had = use.processors * use.seconds
    return {
        "others_share": max(use.user + use.system - use.ranks, 0.0) / had,  # the system's ticks are samples
        "steal_share": use.steal / had,
    }


def _processors(record: Record, trial: Trial) -> int | None:
    """Number of CPUs that all ranks of the trial share; None if the record does not say.

    The machine's cores on record are those of the process that wrote it, which the ranks inherit if it
    started them.
    """
    if trial.cluster.device != "cpu" or trial.cluster.launcher != "local":
        return None
    cores = record.machine.get("cores")
    return cores if isinstance(cores, int) and cores > 0 else None


def _step_rows(record: Record) -> list[dict[str, Any]]:
    return [
        {"id": record.id, "rank": rank.rank, "node": rank.node, "local": rank.local, **step.model_dump()}
        for rank in record.ranks
        for step in rank.steps
    ]


def _token_rows(record: Record) -> list[dict[str, Any]]:
    return [
        {"id": record.id, "rank": rank.rank, **token.model_dump()}
        for rank in record.ranks
        for token in rank.tokens
    ]


def _interface_rows(record: Record) -> list[dict[str, Any]]:
    headers = record.link.details.get("header_bytes") if record.link else None
    return [
        {"id": record.id, "header_bytes": headers, **counters.model_dump()}
        for counters in record.interfaces or []
    ]


def _bytes_frame(records: list[Record]) -> pd.DataFrame:
    """Ledger and prediction, summed over units."""
    rows: list[dict[str, Any]] = []
    for record in records:
        predicted: list[list[LedgerRow]] = record.predicted.ledgers if record.predicted else []
        for place, rank in enumerate(record.ranks):
            sources = {
                "ledger": rank.ledger or [],
                "predicted": predicted[place] if place < len(predicted) else [],
            }
            for source, ledger in sources.items():
                where = {"id": record.id, "source": source, "rank": rank.rank, "node": rank.node}
                rows += [where | entry.model_dump(exclude={"unit"}) for entry in ledger]
    frame = _frame(rows, BYTES)
    return frame.groupby(list(BYTES[:-2]), as_index=False, sort=False)[["bytes", "messages"]].sum()


def _unit_bytes(record: Record) -> dict[tuple[str, str, str], int]:
    """Bytes to other nodes by (unit, phase, purpose), of the node that sends most of them."""
    sent: dict[tuple[str, str, str], Counter[int]] = defaultdict(Counter)
    for rank in record.ranks:
        for row in rank.ledger or []:
            if row.link == "inter":
                sent[row.unit, row.phase, row.purpose][rank.node] += row.bytes
    return {key: max(nodes.values()) for key, nodes in sent.items()}


def _memory_rows(record: Record) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for rank in record.ranks:
        memory = rank.memory
        parts = [("engine", name, size) for name, size in memory.engine.items()]
        parts += [("formula", name, size) for name, size in memory.formula.items()]
        parts.append(("process", "peak_rss", memory.peak_rss))
        if memory.peak_device is not None:
            parts.append(("process", "peak_device", memory.peak_device))
        timed = max(1, sum(not step.warmup for step in rank.steps))
        parts += [("copied", name, size // timed) for name, size in memory.copied.items()]
        parts += [("copied_formula", name, size // timed) for name, size in memory.copied_formula.items()]
        rows += [
            {"id": record.id, "rank": rank.rank, "source": source, "part": part, "bytes": size}
            for source, part, size in parts
        ]
    return rows


def _link_rows(record: Record) -> list[dict[str, Any]]:
    link = record.link
    if link is None:
        return []
    measured = [("calibrated", value) for value in link.calibrated_mbit]
    measured += [("probed", value) for value in link.probed_mbit]
    return [
        {
            "id": record.id,
            "order": record.order,
            "kind": link.kind,
            "why": link.why,
            "when": when,
            "requested_mbit": link.requested_mbit,
            "achieved_mbit": value,
            "message_bytes": link.message_bytes,
        }
        for when, value in measured
    ]


def _failure_row(record: Record, trial: Trial, naming: _Naming) -> dict[str, Any]:
    cell, where = naming.cell(trial)
    topology = trial.topology()
    named = {
        "contender": naming.contender(trial),
        "where": where,
        "cell": cell,
        "strategy": trial.strategy,
        "place": order_of(trial.strategy),
        "parameters": record.parameters,
        "nodes": topology.nodes,
        "ranks_per_node": topology.ranks_per_node,
    }
    repetition = {"id": record.id, "seed": trial.seed, "repeat": trial.repeat}
    return repetition | named | (record.failure.model_dump() if record.failure else {})


def _environment(record: Record) -> dict[str, Any]:
    """Facts of one record under dotted names: machine, code, and algorithms used."""
    facts = _flat({"machine": record.machine, "code": record.code, "ran": record.ran})
    if record.link is not None:
        facts |= {"link.kind": record.link.kind, "link.why": record.link.why}
        facts |= {f"link.{key}": value for key, value in record.link.details.items()}
    return facts


def _facts_frame(records: list[Record]) -> pd.DataFrame:
    """Each distinct value of each fact in each pool, with how many records have it."""
    counts: dict[tuple[str, str, str], int] = {}
    for record in records:
        for fact, value in _environment(record).items():
            text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
            counts[record.pool, fact, text] = counts.get((record.pool, fact, text), 0) + 1
    rows = [
        {"pool": pool, "fact": fact, "value": value, "records": n}
        for (pool, fact, value), n in counts.items()
    ]
    return _frame(rows, FACTS).sort_values(["pool", "fact", "value"], ignore_index=True)


def _without_old_failures(records: list[Record]) -> list[Record]:
    """The records without failures of other pools than that of the measured records, or of the latest.

    ``zeropp run`` ignores those failures too, and runs their trials again.
    """
    measured = {record.pool for record in records if record.measured}
    kept = measured or {max(records, key=lambda record: record.started).pool}
    return [record for record in records if record.pool in kept]


def _check_one_pool(records: list[Record]) -> None:
    """Refuse records of different machines or code, naming the differences.

    Raises:
        ReportError: naming each pool, its records and the facts that differ.
    """
    pools: dict[str, list[Record]] = {}
    for record in records:
        pools.setdefault(record.pool, []).append(record)
    if len(pools) == 1:
        return
    told = "; ".join(
        f"{pool}: {len(members)} records, such as {members[0].id}" for pool, members in sorted(pools.items())
    )
    first = [_flat({"machine": m[0].machine, "code": m[0].code}) for _, m in sorted(pools.items())]
    differing = sorted(
        key for key in {k for facts in first for k in facts} if len({str(f.get(key)) for f in first}) > 1
    )
    values = "; ".join(f"{key}: {' / '.join(str(f.get(key)) for f in first)}" for key in differing[:6])
    raise ReportError(
        f"records of {len(pools)} pools (other machine or code) are not drawn together: {told}. "
        f"They differ in {values or 'facts that are not recorded'}. Move one pool to a folder of its own"
    )
