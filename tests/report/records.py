"""Schema-valid records of suites that never ran: times from a simple model, noise from the id.

Bytes and memory come from ``impl.plan.traffic``, so predictions and ledgers agree; interfaces add 2 %
of headers.  A step takes max(compute, wire) plus a tenth of the smaller, times a noise of 2 %; all ranks
together keep the machine's processors busy for nine tenths of compute, and others for a hundredth of the
time.
"""

from __future__ import annotations

import functools
import operator
import tempfile
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np

from docs.numbers import REFERENCE, ROOT
from harness.records import archive
from harness.records.packet_sizes import HEADER_BYTES
from harness.records.trial_record import (
    Alone,
    Failure,
    InterfaceCounters,
    LedgerRow,
    LinkRecord,
    Memory,
    Predicted,
    ProcessorUse,
    RankRecord,
    Record,
    Step,
    Validation,
    read_all,
    with_digest,
)
from harness.suites.trial import Cluster, Model, Trial
from impl.plan.memory import memory
from impl.plan.traffic import passes, predict
from impl.policy.policy import Policy
from impl.policy.shard_layout import ParameterSpec, UnitGeometry, lay_out
from impl.policy.topology import Topology

POOL: Final = "0123456789ab"
_CORES: Final = 2
MACHINE: Final = {
    "cpu": "Example CPU",
    "cores": _CORES,
    "memory_gib": 8.0,
    "kernel": "6.1",
    "python": "3.12.1",
    "packages": {"torch": "2.13.0", "numpy": "2.4.6"},
    "gpus": [],
}
CODE: Final = {"version": "0.1.0", "commit": "c0ffee", "dirty": False, "source": "feedface"}
CRASHED: Final = Failure(kind="crashed", message="lost", log=None)
HIDDEN: Final = 256
LAYERS: Final = 4


def units_of(topology: Topology, grain: int = 2048) -> list[UnitGeometry]:
    block = [
        ParameterSpec("attention", (4 * HIDDEN, HIDDEN)),
        ParameterSpec("mlp", (8 * HIDDEN, HIDDEN)),
        ParameterSpec("norms", (4 * HIDDEN,)),
    ]
    outer = [ParameterSpec("embedding", (256, HIDDEN)), ParameterSpec("positions", (128, HIDDEN))]
    blocks = {"root": outer} | {f"blocks.{layer}": block for layer in range(LAYERS)}
    world = topology.world
    return [lay_out(name, specs, grain=grain, world=world, max_padding=9) for name, specs in blocks.items()]


def record_of(
    trial: Trial,
    /,
    *,
    order: int = 0,
    failure: Failure | None = None,
    ran: Mapping[str, Any] = {},
    **fields: Any,
) -> Record:
    """The record of a trial, without results if it failed, with further ``ran`` and other ``fields``."""
    time = f"2026-01-02T03:{order // 60:02}:{order % 60:02}+00:00"
    results = {} if failure else _results(trial)
    results |= {"ran": results["ran"] | ran} if ran else {}
    usual = {
        "id": trial.id, "suite": "quickstart", "trial": trial.canonical(), "started": time, "finished": time,
        "order": order, "machine": MACHINE, "code": CODE, "pool": POOL, "failure": failure,
    }  # fmt: skip
    return with_digest(Record(**{**usual, **results, **fields}))


def changed(record: Record, **fields: Any) -> Record:
    """``record`` with other fields, and the digest that it had."""
    return record.model_copy(update=fields)


def ending_at(trial: Trial, loss: float, *, seconds: float = 100.0) -> Record:
    """The record of a trial whose validation loss falls from 5 to ``loss``, on a line of four validations."""
    last = trial.warmup + trial.steps
    curve = [
        Validation(
            step=last * part // 4, loss=5.0 + (loss - 5.0) * part / 4, train_seconds=seconds * part / 4,
            inter_bytes=part,
        )
        for part in range(1, 5)
    ]  # fmt: skip
    return record_of(trial, validations=curve)


def changed_steps(record: Record, change: Callable[[Step], dict[str, Any]]) -> Record:
    """``record`` with the fields that ``change`` gives of each step of each rank."""
    ranks = [
        rank.model_copy(update={"steps": [step.model_copy(update=change(step)) for step in rank.steps]})
        for rank in record.ranks
    ]
    return changed(record, ranks=ranks)


def busy_while_waiting(record: Record, seconds: float = 1.0) -> Record:
    """``record`` with waits in backward longer by ``seconds``, and ranks that fill two processors."""
    processors = 2 / len(record.ranks)
    longer = ("total", "backward", "exposed_backward")

    def change(step: Step) -> dict[str, Any]:
        if step.exposed_backward is None:  # a peer, whose waiting is inside its parts
            return {"cpu_seconds": step.total * processors}
        waited = {name: getattr(step, name) + seconds for name in longer}
        return waited | {"cpu_seconds": waited["total"] * processors}

    return changed_steps(record, change)


def with_alone(record: Record, forward: float, backward: float, optimizer: float = 0.0) -> Record:
    """``record`` with two samples of computation by itself on every rank, of one thread."""
    samples = [
        Alone(
            when=when, forward=forward, backward=backward, optimizer=optimizer,
            cpu_seconds=forward + backward, optimizer_cpu_seconds=optimizer,
        )
        for when in ("before", "after")
    ]  # fmt: skip
    return changed(record, ranks=[rank.model_copy(update={"alone": samples}) for rank in record.ranks])


def on_link(record: Record, mbit: float) -> Record:
    """``record`` whose probe after the trial measured this rate."""
    assert record.link is not None
    return changed(record, link=record.link.model_copy(update={"probed_mbit": [mbit]}))


def taken_by_others(record: Record, others: float, steal: float = 0.0) -> Record:
    """``record`` in which other programs and the hypervisor took these shares of processor time."""
    use = record.processor_use
    assert use is not None
    had = use.seconds * use.processors
    changes = {"user": use.ranks - use.system + others * had, "steal": steal * had}
    return changed(record, processor_use=use.model_copy(update=changes))


def _processor_use(ranks: list[RankRecord]) -> ProcessorUse:
    """Use of a machine by its ranks' steps, with a hundredth for others and a fiftieth for interrupts."""
    timed = [[step for step in rank.steps if not step.warmup] for rank in ranks]
    seconds = max(sum(step.total for step in steps) for steps in timed) or 1.0
    computed = sum(step.cpu_seconds or 0.0 for steps in timed for step in steps)
    had = seconds * _CORES
    return ProcessorUse(
        seconds=seconds, processors=_CORES, ranks=computed,
        user=0.9 * computed + 0.01 * had, system=0.1 * computed, interrupts=0.02 * had, steal=0.0,
    )  # fmt: skip


def _results(trial: Trial) -> dict[str, Any]:
    noise = np.random.default_rng(int(trial.id, 16))
    topology, policy = trial.topology(), trial.resolved_policy()
    units, world = units_of(topology), topology.world
    run = trial.accumulation, trial.steps
    ledgers = [_ledger(policy, topology, tuple(units), rank, run) for rank in range(world if policy else 0)]
    egress = 0.0  # bytes per step that one node sends to others
    if topology.nodes > 1 and ledgers:
        sent = sum(row.bytes for rows in ledgers for row in rows if row.link == "inter")
        egress = sent / topology.nodes / trial.steps
    elif topology.nodes > 1:  # a ring of 32-bit gradients
        egress = 2 * 4 * sum(unit.padded for unit in units) * (world - 1) / world
    rate = (trial.cluster.rate or 20_000.0) * (1 + 0.01 * noise.standard_normal())
    compute = 2e-4 * trial.tokens_per_rank * trial.accumulation
    wire = 8 * egress / (rate * 1e6)
    step_seconds = max(compute, wire) + 0.1 * min(compute, wire)
    held = memory(policy, topology, units) if policy else {}
    ranks = [
        RankRecord(
            rank=rank,
            node=topology.node_of(rank),
            local=rank % topology.ranks_per_node,
            steps=_steps(trial, policy, compute, step_seconds, noise),
            ledger=ledgers[rank] if ledgers else None,
            memory=Memory(engine=held, formula=held, peak_rss=400_000_000),
        )
        for rank in range(world)
    ]
    return {
        "ran": {"transport": trial.cluster.transport, "gather": policy.gather if policy else "library"},
        "units": [(unit.name, unit.numel, unit.padded) for unit in units],
        "parameters": sum(unit.numel for unit in units),
        "link": _link(trial, rate, noise),
        "ranks": ranks,
        "interfaces": [
            InterfaceCounters(
                node=node,
                tx_bytes=int(egress * trial.steps * 1.02),
                tx_packets=int(0.02 * egress * trial.steps / HEADER_BYTES),
            )
            for node in range(topology.nodes)
        ],
        "validations": _validations(trial, policy, step_seconds, egress * topology.nodes, noise),
        "predicted": Predicted(ledgers=ledgers, equal=True) if ledgers else None,
        "reference_loss": 5.55,
        "processor_use": _processor_use(ranks),
    }


@functools.cache
def _ledger(
    policy: Policy, topology: Topology, units: tuple[UnitGeometry, ...], rank: int, run: tuple[int, int]
) -> list[LedgerRow]:
    """Predicted rows; cached, since trials that differ only in seed or repeat have the same."""
    micro_batches, steps = run
    events = passes(policy, micro_batches=micro_batches, norms=1) * steps
    predicted = predict(policy, topology, units, rank, events).sent
    return [LedgerRow(**key._asdict(), **sent._asdict()) for key, sent in predicted.items()]


def _steps(
    trial: Trial, policy: Policy | None, compute: float, step: float, noise: np.random.Generator
) -> list[Step]:
    exposed = max(step - compute, 0.0)
    parts = {
        "total": step,
        "forward": 0.3 * compute + 0.4 * exposed,
        "backward": 0.62 * compute + 0.6 * exposed,
        "optimizer": 0.06 * compute,
        "cpu_seconds": 0.9 * _CORES / trial.topology().world * compute,
    }
    waits = (0.4 * exposed, 0.6 * exposed) if policy else (None, None)

    def timed(index: int) -> Step:
        stretch = 1 + 0.02 * abs(noise.standard_normal())
        seconds = {name: stretch * part for name, part in parts.items()}
        warmup, loss = index < trial.warmup, _loss(index + 1, policy, noise)
        waited = {"exposed_forward": waits[0], "exposed_backward": waits[1]}
        return Step(index=index, warmup=warmup, loss=loss, gradient_norm=1.0, **seconds, **waited)

    return [timed(index) for index in range(trial.warmup + trial.steps)]


def _loss(step: int, policy: Policy | None, noise: np.random.Generator) -> float:
    bits = min(policy.gradients[1].bits, policy.weights.bits) if policy else 16
    return 1.6 + 3.9 / (1 + 0.12 * step) + 0.4 * 4.0**-bits + 0.01 * float(noise.standard_normal())


def _link(trial: Trial, rate: float, noise: np.random.Generator) -> LinkRecord | None:
    if trial.cluster.nodes == 1:
        return None
    achieved = [float(0.96 * rate * (1 + 0.01 * noise.standard_normal())) for _ in range(3)]
    return LinkRecord(
        kind="namespaces" if trial.cluster.rate else "none",
        why="asked for",
        requested_mbit=trial.cluster.rate,
        calibrated_mbit=achieved,
        probed_mbit=[float(0.96 * rate)],
        message_bytes=1_000_000,
        details={"mtu": 1500, "header_bytes": 66},
    )


def _validations(
    trial: Trial, policy: Policy | None, step: float, sent: float, noise: np.random.Generator
) -> list[Validation]:
    if trial.validate_every is None:
        return []
    last = trial.warmup + trial.steps
    every = trial.validate_every or last
    return [
        Validation(
            step=at,
            loss=_loss(at, policy, noise),
            train_seconds=at * step,
            inter_bytes=int(at * sent) if policy else None,
        )
        for at in sorted({*range(every, last + 1, every), last})
    ]


@functools.cache
def committed(suite: str) -> list[Record]:
    """The records in results/reference."""
    with tempfile.TemporaryDirectory() as folder:
        return read_all(archive.unpack(ROOT / REFERENCE / f"{suite}.tar.xz", Path(folder)))


def trials_of(suite: str, *, repeats: int = 3) -> list[Trial]:
    """Trials as the suite of that name would run them, smaller: one for each combination of its axes."""
    axes, fixed = _SUITES[suite]
    again = _by("repeat", *range(repeats))
    combinations = (functools.reduce(operator.or_, changes, fixed) for changes in product(again, *axes))
    return [_BASE.model_copy(update=changes) for changes in combinations]


def records_of(suite: str, *, repeats: int = 3) -> list[Record]:
    if suite not in _SUITES:
        return committed(suite)
    return [
        record_of(trial, suite=suite, order=order)
        for order, trial in enumerate(trials_of(suite, repeats=repeats))
    ]


_BASE: Final = Trial(cluster=Cluster(rate="50 Mbit/s"), model=Model(name="gpt-small"), steps=4, warmup=1)


def _by(field: str, *values: object) -> list[dict[str, object]]:
    """An axis: a field of a trial with each of its values."""
    return [{field: value} for value in values]


_RATES: Final = ("12.5 Mbit/s", "50 Mbit/s", "200 Mbit/s", "800 Mbit/s", "unshaped")
_Axes = list[list[dict[str, object]]]
_SUITES: Final[dict[str, tuple[_Axes, dict[str, object]]]] = {
    "quickstart": ([_by("strategy", "zero3", "qwz", "hpz", "qgz", "zeropp")], {"validate_every": 0}),
    "baselines": ([_by("strategy", "zero3", "zero3-flat", "hpz", "zeropp")], {}),
    "bandwidth": (
        [
            _by("strategy", "zero3", "zeropp", "fsdp2"), _by("tokens_per_rank", 512, 2048),
            _by("cluster", *(Cluster(rate=rate) for rate in _RATES)),
        ],
        {},
    ),
}  # fmt: skip
SUITES: Final = tuple(_SUITES)
