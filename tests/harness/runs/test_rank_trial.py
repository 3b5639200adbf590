"""One trial runs on its ranks, and their outcomes become a record."""

from __future__ import annotations

import contextlib
import json
import math
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from torch import nn

from harness.cluster.link import open_link
from harness.cluster.rank import Rank
from harness.cluster.rank_processes import LaunchError, run_ranks
from harness.measure.cpu_usage import busy_seconds
from harness.measure.machine import cores
from harness.measure.quantisation_error import BITS, BLOCKS
from harness.records.packet_sizes import HEADER_BYTES
from harness.records.trial_record import AdapterCounters, LedgerRow, Record, Validation
from harness.reference_checks.comparison import TrialError
from harness.runs.feasibility import any_host, forecast
from harness.runs.merge_ranks import assemble
from harness.runs.rank_trial import Assignment, Outcome, run
from harness.suites.trial import Trial
from harness.workloads.models import GPT, GPTShape
from impl.codecs.codec import parse
from impl.policy.presets import PRESETS
from impl.policy.topology import Topology
from report.data.frames import frames_of
from report.data.metrics import derive
from report.tables.errors import chosen_codecs
from tests.harness.cluster.test_link import cluster_with, launch_of
from tests.harness.cluster.test_rank_processes import local
from tests.support.params import long

INSTALLED = pytest.mark.needs("DeepSpeed")
STAGES_OF_DEEPSPEED = ("deepspeed-kept", "deepspeed-serial", "deepspeed-stage1", "deepspeed-stage2-overlap")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the path of a small corpus."""
    path = tmp_path_factory.mktemp("corpus") / "text"
    path.write_text("".join(f"line {i}: {i * i} is the square of {i}\n" for i in range(2000)))
    return str(path)


def trial(text: str, strategy: str, **changes: Any) -> Trial:
    return Trial.model_validate(
        {
            "strategy": strategy,
            "model": {"name": "gpt-tiny"},
            "policy": {"max_padding": 1.0},
            "cluster": {"nodes": 2, "ranks_per_node": 2},
            "corpus": text,
            "sequence": 16,
            "tokens_per_rank": 32,
            "steps": 3,
            "warmup": 2,
            "validation_batches": 2,
            **changes,
        }
    )


def outcomes(trial: Trial, log: Path) -> list[Outcome]:
    topology = Topology(1, 1) if trial.strategy == "single" else trial.topology()
    return run_ranks(run, Assignment(trial, None), local(topology, log))


def assembled(ranks: list[Outcome], trial: Trial | None = None) -> Record:
    """Return the record of outcomes; the trial is needed only if errors were measured."""
    blank = Record(
        id="", suite="", trial={} if trial is None else trial.canonical(), started="", finished="", order=0,
        machine={}, code={}, pool="", failure=None,
    )  # fmt: skip
    return assemble(ranks, blank)


def result(trial: Trial, log: Path) -> Record:
    return assembled(outcomes(trial, log), trial)


@pytest.mark.parametrize(
    ("strategy", "policy", "every"),
    [
        ("exact", {}, 0),
        ("zero3", {"order_every": 2}, None),  # ranks compare the order of their exchanges
        ("hpz", {}, 2),
        ("zeropp", {}, 3),
        ("zeropp", {}, None),
        ("zero2", {"compute": "bf16"}, None),
        *long(*((strategy, {"compute": "bf16"}, None) for strategy in ("zero0", "zero1", "mics"))),
    ],
)
def test_the_ledger_is_the_prediction(
    text: str, tmp_path: Path, strategy: str, policy: dict[str, Any], every: int | None
) -> None:
    """With validations at any step, at every stage and type, every rank sent the predicted bytes."""
    changes = {"policy": {"max_padding": 9.0, **policy}, "validate_every": every}
    record = result(trial(text, strategy, accumulation=2, clip=1.0, **changes), tmp_path / "log")
    assert record.predicted.equal
    rows = [row for rank in record.ranks for row in rank.ledger or []]
    assert any(row.phase == "evaluate" for row in rows) == (every is not None)
    assert any(row.purpose == "control" for row in rows)  # the norm, by which gradients are clipped
    assert any(row.link == "inter" and row.purpose == "gradients" for row in rows)
    expected = {None: [], 0: [5], 2: [2, 4, 5], 3: [3, 5]}[every]
    assert [validation.step for validation in record.validations] == expected


def test_what_adapters_sent_is_on_record_beside_the_ledger(text: str, tmp_path: Path) -> None:
    """A node's InfiniBand counters have the bytes that its ranks booked to other nodes, without evaluations."""
    sent = AdapterCounters(node=1, tx_bytes=123, ports=["mlx5_0/1"])
    validated = trial(text, "zero3", validate_every=2)
    ranks = outcomes(validated, tmp_path / "log")
    ranks[2] = replace(ranks[2], adapters=sent)
    (adapters,) = assembled(ranks, validated).adapters
    rows = [row for rank in ranks[2:] for row in rank.record.ledger or [] if row.link == "inter"]
    booked = sum(row.bytes for row in rows if row.phase != "evaluate")
    assert adapters == sent.model_copy(update={"booked_bytes": booked})
    assert 0 < booked < sum(row.bytes for row in rows)


def test_codecs_within_a_budget_are_on_record(text: str, tmp_path: Path) -> None:
    """The record has the codecs of every renewal, they explain the ledger, and no more bytes are sent between nodes
    than planned.
    """
    budgeted = trial(
        text,
        "zeropp",
        policy={
            "max_padding": 9.0,
            "weights": "int4:32",
            "gradients": ["int8:32", "int4:32"],
            "budget": "weights 6.5 gradients 6.5 every 3 of int2:32 int3:32 int6:32 int8:32",
        },
        accumulation=2,
        clip=1.0,
        validate_every=2,
        measure_quantisation=True,
    )
    record = result(budgeted, tmp_path / "log")
    assert record.predicted.equal
    assert {choice.step for choice in record.chosen_codecs} == {1, 4}
    assert {choice.what for choice in record.chosen_codecs} == {"weights", "gradients"}
    assert {choice.unit for choice in record.chosen_codecs} == {name for name, _, _ in record.units}
    assert any(choice.codec != "int4:32" for choice in record.chosen_codecs)
    sent = sum(training(row) for rank in record.ranks for row in rank.ledger or [])
    (planned,) = forecast([budgeted], any_host())
    assert sent <= budgeted.steps * planned.inter
    shown = record.model_copy(
        update={"id": budgeted.id, "started": "2026-01-02", "finished": "2026-01-02", "pool": "p"}
    )
    table = chosen_codecs(derive(frames_of([shown])))
    assert len(table.data) == 2 * len(record.units)
    for row in table.data.to_dict("records"):
        choices = [c for c in record.chosen_codecs if (c.what, c.unit) == (row["what"], row["unit"])]
        assert row["codecs"].startswith(f"1: {choices[0].codec}")
        assert row["vnmse"] == pytest.approx(choices[-1].vnmse)


def budgeted_trial(text: str) -> Trial:
    policy = {"gradients": "int4:32", "budget": "gradients every 1 of int2:32", "max_padding": 9.0}
    return trial(text, "qgz", policy=policy)


@pytest.fixture(scope="module")
def budgeted(text: str, tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    """Return the outcomes of a trial with a bit budget."""
    return outcomes(budgeted_trial(text), tmp_path_factory.mktemp("budgeted") / "log")


def test_inconsistent_outcomes_are_no_result(text: str, budgeted: list[Outcome]) -> None:
    """Refused are a loss or gradient before training that differs from a single process's, a ledger that is one byte
    off, and codecs that differ between ranks; the message names the rank and the numbers.
    """
    own = budgeted_trial(text)
    assert math.isfinite(assembled(budgeted, own).reference_loss or math.nan)
    rank = budgeted[1]
    loss, error = rank.compared.losses[0], rank.compared.gradient_errors[0]
    first, *others = rank.record.ledger or []
    ledger = [first.model_copy(update={"bytes": first.bytes + 1}), *others]
    losses = [replace(loss, sharded=loss.sharded + 2e-3)]
    for change, message in (
        (
            {"compared": replace(rank.compared, losses=losses)},
            r"loss of rank 1 is .* differ by more than 0.0001",
        ),
        (
            {"compared": replace(rank.compared, gradient_errors=[replace(error, share=1.01)])},
            "before training rank 1's reduced gradient of unit",
        ),
        (
            {"record": rank.record.model_copy(update={"ledger": ledger})},
            f"rank 1 sent {first.bytes + 1} bytes .* predicted are {first.bytes} bytes",
        ),
        ({"chosen": rank.chosen[1:]}, "rank 1 chose other codecs"),
    ):
        with pytest.raises(TrialError, match=message):
            assembled([budgeted[0], replace(rank, **change), *budgeted[2:]], own)
    for loss in (math.nan, math.inf):
        ended = Validation(step=9, loss=loss, train_seconds=1.0, inter_bytes=None)
        with pytest.raises(TrialError, match=f"the validation loss after step 9 is {loss}"):
            assembled([replace(outcome, validations=[ended]) for outcome in budgeted], own)


def test_a_record_has_the_use_of_processors(text: str, tmp_path: Path) -> None:
    """In the timed steps, the ranks' CPU seconds are at least those of their steps, and at most those of all programs
    and processors; without ``/proc/stat`` none are recorded.
    """
    record = result(trial(text, "zero3", steps=30), tmp_path / "log")
    if busy_seconds() is None:
        assert record.processor_use is None
        return
    use = record.processor_use
    timed = [[step for step in rank.steps if not step.warmup] for rank in record.ranks]
    assert use.seconds >= sum(step.total for step in timed[0])  # the first rank's clock
    assert use.ranks >= sum(step.cpu_seconds or 0.0 for steps in timed for step in steps)
    assert use.processors == cores()
    assert use.ranks <= use.seconds * use.processors * 1.05
    assert use.user + use.system >= 0.7 * use.ranks - 0.2  # ticks are samples
    assert use.user + use.system + use.interrupts + use.steal <= use.seconds * use.processors * 1.05 + 0.2


@pytest.mark.parametrize(
    ("strategy", "cluster", "blocks"),
    [
        ("exact", {"nodes": 1, "ranks_per_node": 2, "transport": "gloo"}, 2),
        ("exact", {"nodes": 1, "ranks_per_node": 2, "transport": "shm"}, 1),
        ("exact", {"nodes": 2, "ranks_per_node": 1, "link": "none"}, 2),
        ("exact", {"nodes": 1, "ranks_per_node": 2, "ranks": "threads"}, 1),
        ("zero3", {"nodes": 1, "ranks_per_node": 2, "transport": "gloo"}, 1),
    ],
)
def test_weights_gathered_ahead_are_planned(
    text: str, tmp_path: Path, strategy: str, cluster: dict[str, Any], blocks: int
) -> None:
    """A plan has the weights that a rank holds at one time: with exact messages over gloo both blocks, not one."""
    planned = trial(text, strategy, cluster=cluster, policy={"max_padding": 1.0, "max_reuse": 0})
    record = result(planned, tmp_path / "log")
    (plan,) = forecast([planned], any_host())
    root, *others = (padded for _, _, padded in record.units)
    assert plan.memory is not None
    for rank in record.ranks:
        assert rank.memory.engine["gathered"] == rank.memory.formula["gathered"] == plan.memory["gathered"]
        assert rank.memory.engine["gathered"] == 4 * (root + sum(sorted(others)[-blocks:]))


def test_ranks_on_several_machines_have_no_use_of_processors(text: str, tmp_path: Path) -> None:
    """With torchrun, ranks may be on several machines, so that no CPU seconds of a machine are recorded."""
    record = result(trial(text, "zero3", cluster={"launcher": "torchrun"}), tmp_path / "log")
    assert record.processor_use is None


def test_a_result_holds_raw_values(text: str, tmp_path: Path) -> None:
    """Every step of every rank is recorded: its parts are within its total, exposed time is within its parts, and the
    CPU seconds of its process are within those of all processors.
    """
    record = result(trial(text, "zeropp"), tmp_path / "log")
    assert [rank.rank for rank in record.ranks] == [0, 1, 2, 3]
    assert [(rank.node, rank.local) for rank in record.ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for rank in record.ranks:
        assert [step.index for step in rank.steps] == [0, 1, 2, 3, 4]
        assert all(step.warmup == (step.index < 2) for step in rank.steps)
        for step in rank.steps:
            assert 0 < step.forward + step.backward + step.optimizer <= step.total + 2e-6  # rounded each
            assert 0 <= (step.exposed_forward or 0) <= step.forward
            assert 0 <= (step.exposed_backward or 0) <= step.backward
            assert step.cpu_seconds
            assert step.cpu_seconds <= step.total * cores()
        for part in ("masters", "gradients", "optimizer", "secondary", "gathered"):
            assert rank.memory.engine[part] == rank.memory.formula[part]
        assert rank.memory.peak_rss > 50 << 20
    assert record.ran["transports"]["node"].startswith("gloo")
    assert record.ran["transports"]["local"] == "shm"
    assert len(record.units) == 3
    assert record.interfaces is None


@pytest.mark.parametrize(
    ("strategy", "peer"),
    [
        ("ddp", "bf16"),
        *long(("single", "bf16"), ("ddp-bf16", "fp32"), ("fsdp2-prefetch", "bf16")),
        pytest.param("deepspeed", "bf16", marks=INSTALLED),
    ],
)
def test_peers_have_one_processs_loss(text: str, tmp_path: Path, strategy: str, peer: str) -> None:
    """Before training, a peer that computes in bf16 has the loss of a single process in bf16, which differs from that
    in fp32.
    """
    for outcome in outcomes(trial(text, strategy, peer={"compute": peer}, accumulation=2), tmp_path / "log"):
        first = outcome.compared.losses[0]
        assert first.sharded == pytest.approx(first.expected, abs=1e-4)
        assert (first.expected == first.reference) == (peer == "fp32")


@pytest.mark.parametrize(
    ("strategy", "peer"),
    [
        ("fsdp2", {"group": "node"}),
        *long(
            ("fsdp2-kept-prefetch", {"group": "node", "compute": "bf16"}),
            ("fsdp2", {"compute": "bf16", "reduce_dtype": "fp32"}),
            ("ddp-tuned", {"bucket_mb": 0.1}),
        ),
        *(pytest.param(name, {}, marks=[INSTALLED, pytest.mark.long]) for name in STAGES_OF_DEEPSPEED),
    ],
)
def test_peers_with_other_settings_train_as_one_process(
    text: str, tmp_path: Path, strategy: str, peer: dict[str, Any]
) -> None:
    """Their first loss and, where they show them, gradients are a single process's; with a copy in each node a rank
    holds a node's share.
    """
    record = result(trial(text, strategy, peer=peer), tmp_path / "log")
    shows = not strategy.startswith("deepspeed")
    assert bool(record.first_gradients) == shows
    assert all(error.share <= 1 for error in record.first_gradients)
    if peer.get("group") == "node":
        for rank in record.ranks:
            assert rank.memory.engine["masters"] == pytest.approx(4 * record.parameters / 2, rel=0.02)


@INSTALLED
@pytest.mark.parametrize("copies", [1, 2])
def test_deepspeed_s_shards_are_counted(text: str, tmp_path: Path, copies: int) -> None:
    """Each rank holds a padded quarter of weights and masters in fp32, and hpZ's copy is the node's half."""
    config = json.dumps({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": copies}})
    record = result(trial(text, "deepspeed", deepspeed_config=config), tmp_path / "log")
    for rank in record.ranks:
        held = rank.memory.engine
        assert held["masters"] == pytest.approx(2 * 4 * record.parameters / 4, rel=0.02)
        assert held["gradients"] == pytest.approx(4 * record.parameters / 4, rel=0.02)
        assert held["optimizer"] == pytest.approx(2 * held["gradients"], rel=0.02)
        assert held.get("secondary", 0) == pytest.approx(4 * record.parameters / 2 * (copies - 1), rel=0.02)
        assert rank.ledger is None


def test_quantisation_errors_fall_with_bits(text: str, tmp_path: Path) -> None:
    """Errors on all ranks' weights and gradients fall with every bit, and grow with the block size."""
    record = result(trial(text, "zeropp", measure_quantisation=True), tmp_path / "log")
    errors = record.quantisation
    by_codec = {(error.purpose, error.unit, error.codec): error for error in errors}
    units = {error.unit for error in errors}
    assert len(units) == 3
    assert len(errors) >= 2 * len(units) * len(BITS) * len(BLOCKS)
    for purpose in ("weights", "gradients"):
        for unit in units:
            ladder = [by_codec[purpose, unit, f"int{bits}:64"].vnmse for bits in BITS]
            assert all(0 < finer < coarser for coarser, finer in pairwise(ladder))
            small, large = (by_codec[purpose, unit, f"int4:{block}"].vnmse for block in (64, "shard"))
            assert small < large
    for error in errors:
        if error.codec == "int8:64":
            assert error.largest <= parse("int8:64").error_bound(-1, 1)
    padded = {name: padded for name, _, padded in record.units}
    assert len(record.lossless) == 2 * 2 * len(units)
    for size in record.lossless:
        assert size.elements == padded[size.unit]
        whole = size.codec in ("lossless:zstd", "lossless:zlib")
        assert (size.vnmse == 0) if whole else 0 < size.vnmse < 2.0**-16
        assert size.bytes < (4 if whole else 2) * size.elements


@pytest.mark.needs("namespaces")
@pytest.mark.parametrize(
    "strategy",
    [
        "zeropp",
        pytest.param("fsdp2", marks=pytest.mark.nightly),
        pytest.param("deepspeed", marks=INSTALLED),
    ],
)
def test_the_interface_agrees_with_the_ledger(text: str, tmp_path: Path, strategy: str) -> None:
    """In namespaces a node's interface counts the ledger's training bytes plus 66 bytes per packet, within 3 %."""
    counted = trial(text, strategy, validate_every=2, model={"name": "gpt-small"}, sequence=32, warmup=1)
    with open_link(cluster_with("namespaces", 2, 1000.0), "abc123") as link:
        ranks = run_ranks(run, Assignment(counted, 1_000_000), launch_of(link, tmp_path, 2))
    record = assembled(ranks)
    assert [len(rank.probed) for rank in ranks if rank.record.local == 0] == [2, 2]
    assert [interface.node for interface in record.interfaces] == [0, 1]
    sent = [interface.tx_bytes - HEADER_BYTES * interface.tx_packets for interface in record.interfaces]
    last = record.validations[-1].inter_bytes
    if strategy in ("fsdp2", "deepspeed"):
        assert last > sum(sent) > 0
        return
    for node in (0, 1):
        booked = sum(training(row) for rank in record.ranks if rank.node == node for row in rank.ledger or [])
        assert sent[node] == pytest.approx(booked, rel=0.03)
    assert sum(sent) < last < 2 * sum(sent)  # of all four steps, warm-up included


def test_an_outcome_is_the_same_behind_a_channel_between_hosts(text: str, tmp_path: Path) -> None:
    """An outcome that is sent as JSON is read as an equal outcome, with its sums of errors."""
    for outcome in outcomes(trial(text, "zeropp", measure_quantisation=True), tmp_path / "log"):
        assert TypeAdapter(Outcome).validate_json(TypeAdapter(Outcome).dump_json(outcome)) == outcome


@pytest.mark.long
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("namespaces", marks=pytest.mark.needs("namespaces")),
        pytest.param("paced", marks=pytest.mark.nightly),
    ],
)
def test_untimed_values_are_the_same_over_an_open_link(text: str, tmp_path: Path, kind: Any) -> None:
    """Errors, checks before training, losses and ledgers have the same bits if the link keeps its rate throughout.

    After the timed steps the link has its rate, and the interfaces count as much.
    """
    both = trial(text, "zeropp", validate_every=2, warmup=1, measure_quantisation=True)
    with open_link(cluster_with(kind, 2, 50.0), "abc125") as link:
        launch, assignment = launch_of(link, tmp_path, 2), Assignment(both, 300_000)
        by_target = [run_ranks(target, assignment, launch) for target in (run, run_shaped)]
    for opened, held in zip(*by_target, strict=True):
        sums = [list(outcome) for outcome in (opened.compared.communicated, held.compared.communicated)]
        assert sums[0] == sums[1] != []
        assert opened.compared.errors == held.compared.errors
        assert opened.compared.losses == held.compared.losses
        assert opened.compared.gradient_errors == held.compared.gradient_errors
        assert [v.loss for v in opened.validations] == [v.loss for v in held.validations]
        assert opened.record.ledger == held.record.ledger == opened.predicted
        assert all(0 < rate < 100 for rate in opened.probed)  # an open link has thousands
        if opened.sent is not None and held.sent is not None:
            assert opened.sent.tx_bytes == pytest.approx(held.sent.tx_bytes, rel=0.03)
    assembled(by_target[0], both)


def run_shaped(rank: Rank, assignment: Assignment) -> Outcome:
    """Run a trial on this rank, on a link that keeps its rate throughout."""
    Rank.open_link = lambda _: contextlib.nullcontext()  # type: ignore[method-assign]
    return run(rank, assignment)


def training(row: LedgerRow) -> int:
    return row.bytes if row.link == "inter" and row.phase != "evaluate" else 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"corpus": "/nowhere"}, "/nowhere"),
        ({"policy": {"secondary": 3}}, "hpZ group of 3 ranks does not fit"),
        ({"policy": {}}, "padding"),
        ({"cluster": {"device": "cuda", "transport": "nccl"}}, "the number of GPUs of this machine is 0"),
    ],
)
def test_ranks_refuse_a_trial(text: str, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """Ranks refuse a trial that cannot run, with the numbers."""
    with pytest.raises(LaunchError, match=message) as caught:
        outcomes(trial(text, "zeropp", **changes), tmp_path / "log")
    assert caught.value.kind == "refused"


def test_a_trial_that_takes_no_step_is_no_result(text: str, tmp_path: Path) -> None:
    """If every step in fp16 overflows, the error names the loss scale."""
    policy = {"max_padding": 9.0, "compute": "fp16", "loss_scale": "1e9"}
    with pytest.raises(TrialError, match=r"steps were skipped because .* loss scale of 1e\+09"):
        result(trial(text, "zero2", policy=policy, accumulation=1), tmp_path / "log")


def test_offload_is_recorded_as_predicted(text: str, tmp_path: Path) -> None:
    """Bytes held on host and device, and copied between them, are those that are predicted."""
    shares = {"offload_optimizer": 0.5, "offload_weights": 0.5, "prefetch": 0, "max_padding": 1.0}
    policy = {**shares, "weights": "int8:64", "gradients": "int4:64"}
    for rank in result(trial(text, "zeropp", policy=policy, accumulation=2), tmp_path).ranks:
        held = rank.memory
        assert held.copied == held.copied_formula != {}
        assert {part: held.engine.get(part, 0) for part in held.formula} == held.formula


@pytest.mark.parametrize("weights", ["int8:64", "int4:64:asym", "int3:shard"])
def test_quantised_weights_have_the_loss_of_their_codec(text: str, tmp_path: Path, weights: str) -> None:
    """The loss before training is exactly that of a process whose weights were encoded and decoded once."""
    qwz = trial(text, "qwz", policy={"weights": weights, "max_padding": 9.0}, steps=1, warmup=0)
    for outcome in outcomes(qwz, tmp_path / "log"):
        first = outcome.compared.losses[0]
        assert first.sharded == pytest.approx(first.expected, abs=1e-6)
        assert first.expected != first.reference


def test_checks_before_training_are_no_training(text: str, tmp_path: Path) -> None:
    """Messages of checks are not counted as training: with all steps timed, the bytes up to the last validation are
    the ledger's.
    """
    record = result(trial(text, "zeropp", warmup=0, validate_every=0), tmp_path / "log")
    (last,) = record.validations
    assert last.inter_bytes == sum(training(row) for rank in record.ranks for row in rank.ledger or [])


@pytest.mark.parametrize(
    ("strategy", "policy"),
    [
        ("exact", {}),
        ("zeropp", {"compute": "bf16"}),
        ("zeropp", {"secondary_format": "bf16", "max_reuse": 0}),
        ("zeropp", {"gradients": "int4:64", "reduce": "ring"}),
        ("zero2", {"compute": "fp16", "loss_scale": "1024"}),
        ("mics", {"gradients": "int8:64"}),
        ("qgz", {"gradients": "int4:128:hadamard32:stochastic", "offload_optimizer": 1.0}),
        ("qgz", {"gradients": "mxfp4:stochastic", "feedback": "classic:all", "persist_below": 100}),
        ("fsdp2+qgz", {}),
        ("ddp+qgz", {}),
        ("ddp", None),
        ("fsdp2", None),
    ],
)
def test_reduced_gradients_are_a_single_processs(
    text: str, tmp_path: Path, strategy: str, policy: dict[str, Any] | None
) -> None:
    """Before training, each rank's reduced gradient of a unit equals a single process's within the bound of its
    codecs.

    The bound is not merely generous: exact gradients are far inside.
    """
    changes = {} if policy is None else {"policy": {"max_padding": 1e9, **policy}}
    ranks = outcomes(trial(text, strategy, accumulation=2, steps=1, warmup=0, **changes), tmp_path / "log")
    record = assembled(ranks)
    checks, most = record.first_gradients, 0.1 if strategy in ("exact", "ddp", "fsdp2") else 1
    units = {name for name, _, _ in record.units} or {check.unit for check in checks}
    assert {check.unit for check in checks} == units
    assert all(check.elements > 0 and check.share < most for check in checks)


def test_a_repeat_is_compared_with_a_single_process_in_its_drawn_step(text: str, tmp_path: Path) -> None:
    """The first repeat is compared before training too, others only in the drawn step; training is the same to the bit,
    and every unit is compared.
    """
    records = [
        result(
            trial(text, "zeropp", repeat=repeat, accumulation=2, validate_every=2), tmp_path / f"log{repeat}"
        )
        for repeat in (0, 1)
    ]
    first, further = records
    assert [[(step.loss, step.gradient_norm) for step in rank.steps] for rank in first.ranks] == [
        [(step.loss, step.gradient_norm) for step in rank.steps] for rank in further.ranks
    ]
    assert [rank.ledger for rank in first.ranks] == [rank.ledger for rank in further.ranks]
    assert (first.predicted.equal, further.predicted.equal) == (True, True)
    compared = [{(check.step > 0, check.unit) for check in record.first_gradients} for record in records]
    units = {name for name, _, _ in first.units}
    assert compared[1] == {(True, unit) for unit in units}
    assert compared[0] == compared[1] | {(False, unit) for unit in units}
    assert further.reference_loss is None
    assert first.reference_loss is not None
    assert "before training" not in further.check_cpu_seconds


def test_truncated_gradients_are_no_result(text: str, tmp_path: Path) -> None:
    """If only 16 bytes of every gradient message are sent, the ledger still equals the prediction, but the comparison
    of reduced gradients fails, on any link.
    """
    model = {"name": f"{__name__}:truncating", "arguments": {"after": 0}}
    with pytest.raises(TrialError, match=r"reduced gradient of unit .* differ by more than the codecs allow"):
        result(trial(text, "zeropp", model=model, steps=1, warmup=0), tmp_path / "log")


def dropping(sequence: int) -> Any:
    """Return a model with dropout and a buffer that training changes."""

    class Dropping(GPT):
        def __init__(self) -> None:
            super().__init__(GPTShape(1, 32, 2), sequence)
            self.dropout = nn.Dropout(0.5)
            self.norm = nn.Sequential(self.norm, self.dropout)  # type: ignore[assignment]

    return Dropping()


@pytest.mark.parametrize("strategy", ["ddp", "zeropp"])
def test_dropout_is_no_error(text: str, tmp_path: Path, strategy: str) -> None:
    """A model with dropout passes the check, and is trained with dropout."""
    model, policy = {"name": f"{__name__}:dropping"}, {"max_padding": 1e6}
    record = result(trial(text, strategy, model=model, policy=policy), tmp_path / "log")
    first = math.fsum(rank.steps[0].loss for rank in record.ranks) / len(record.ranks)
    assert abs(first - record.reference_loss) > 1e-3


def stalling(sequence: int) -> Any:
    """Return a model in whose processes the engine sleeps for half a second in every step."""
    from harness.strategies.strategy import Sharded

    backward = Sharded.backward

    def stalled(self: Sharded, loss: Any) -> None:
        time.sleep(0.5)
        backward(self, loss)

    Sharded.backward = stalled  # type: ignore[method-assign]
    return GPT(GPTShape(2, 64, 2), sequence)


@pytest.mark.long
def test_an_engine_that_stalls_computes_no_longer(text: str, tmp_path: Path) -> None:
    """Computation by itself is recorded for every rank; an engine's half second of sleep is in its steps and not in
    that computation.
    """
    model, cluster = {"name": f"{__name__}:stalling"}, {"nodes": 1, "ranks_per_node": 2}
    for rank in result(trial(text, "zero3", model=model, cluster=cluster), tmp_path / "log").ranks:
        assert [sample.when for sample in rank.alone] == ["before"] * 2
        assert all(sample.forward > 0 and sample.backward > 0 for sample in rank.alone)
        assert all(step.total > 0.5 for step in rank.steps)


@pytest.mark.parametrize("strategy", ["single", "zeropp"])
def test_only_sharded_training_has_computation_by_itself(text: str, tmp_path: Path, strategy: str) -> None:
    """It is not measured for a single process, which does nothing else, nor for trials that decode."""
    changes = {} if strategy == "single" else {"workload": "generate", "generate": {"prompt": 4, "tokens": 3}}
    record = result(trial(text, strategy, steps=1, **changes), tmp_path / "log")
    assert all(rank.alone == [] for rank in record.ranks)
    assert record.first_gradients == []


def truncating(sequence: int, after: int = 2) -> Any:
    """Return a model in whose processes gloo sends the first 16 bytes of every gradient message, and zeros for the
    rest.

    Truncating begins ``after`` a number of forward passes of training.
    """
    from impl.comm import exchanges

    whole = exchanges.point_to_point
    passes = 0

    def cut(group: Any, kind: Any, received: Any, sent: Any, tag: int) -> Any:
        if kind != "all_to_all" or passes < after:
            return whole(group, kind, received, sent, tag)
        heads = [part.view(group.size, -1)[:, :16].contiguous() for part in (received, sent)]
        works = whole(group, kind, heads[0].view(-1), heads[1].view(-1), tag)
        for work in works:
            work.wait()
        received.zero_()
        received.view(group.size, -1)[:, :16].copy_(heads[0])
        return []

    class Truncating(GPT):
        def forward(self, tokens: Any, targets: Any) -> Any:
            nonlocal passes
            passes += self.training
            return super().forward(tokens, targets)

    exchanges.point_to_point = cut
    return Truncating(GPTShape(2, 128, 2), sequence)


@pytest.mark.needs("namespaces")
def test_truncated_sends_are_no_result(text: str, tmp_path: Path) -> None:
    """If only 16 bytes of every gradient message are sent after the checks before training, the ledger still equals
    the prediction, but the interfaces have counted less.
    """
    truncated = trial(text, "zero3", model={"name": f"{__name__}:truncating"}, steps=2, warmup=1)
    with open_link(cluster_with("namespaces", 2, 1000.0), "abc124") as link:
        ranks = run_ranks(run, Assignment(truncated, None), launch_of(link, tmp_path, 2))
    with pytest.raises(TrialError, match=r"'s interface sent .* bytes in the timed steps; its ledger holds"):
        assembled(ranks)
    assert [outcome.record.ledger for outcome in ranks] == [outcome.predicted for outcome in ranks]


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", sorted(PRESETS))
@pytest.mark.parametrize(("nodes", "per_node"), [(1, 4), (2, 2), (2, 3), (3, 2), (4, 1)])
def test_every_policy_everywhere(text: str, tmp_path: Path, strategy: str, nodes: int, per_node: int) -> None:
    """Every preset's ledger equals its prediction on every small topology."""
    cluster = {"nodes": nodes, "ranks_per_node": per_node}
    record = result(trial(text, strategy, cluster=cluster, validate_every=1), tmp_path / "log")
    assert record.predicted.equal
