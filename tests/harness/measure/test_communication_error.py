"""Errors of communication equal those computed with plain numpy, and measuring them changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from harness.cluster.rank import Rank
from harness.cluster.rank_processes import run_ranks
from harness.measure import communication_error
from harness.measure.communication_error import Place, combine, mean_cosine, measured_steps
from harness.records.trial_record import CommunicationError, Record
from harness.runs.rank_trial import Assignment, Outcome, run
from harness.suites.suite_file import load
from harness.suites.trial import Cluster, Model, Trial
from impl.codecs.codec import parse
from impl.comm.mesh import Mesh
from impl.policy.policy import Offload
from impl.policy.presets import preset
from impl.policy.topology import Topology
from impl.zero import shard
from tests.harness.cluster.test_rank_processes import local
from tests.harness.measure.test_gradient_bounds import through
from tests.harness.runs.test_rank_trial import assembled, result, text, trial
from tests.support.params import long
from tests.support.training import model

__all__ = ["text"]  # a fixture
SUITES: Final = Path(__file__).resolve().parents[3] / "suites"
Array = NDArray[Any]
Codec = Callable[[Array], Array]


# An independent implementation, in plain numpy, from the ranks' gradients alone


def int4(x: Array) -> Array:
    """Values (..., S) after blocks of 128 in 4 bits: 15 levels between -max and max."""
    blocks = np.concatenate([x, np.zeros((*x.shape[:-1], -x.shape[-1] % 128))], -1)
    blocks = blocks.reshape(*x.shape[:-1], -1, 128)
    scale = np.abs(blocks).max(-1, keepdims=True) / 7
    steps = np.rint(np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale > 0))
    decoded: Array = (steps * scale).reshape(*x.shape[:-1], -1)[..., : x.shape[-1]]
    return decoded


def bf16(x: Array) -> Array:
    """Values after rounding to the nearest 8-bit significand, ties to even."""
    bits = x.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32).astype(float)


def one_hop(rows: Array, codec: Codec, _: Topology) -> tuple[Array, list[float]]:
    """Mean of ``rows`` (source, owner, S), and the error of the hop: everything is encoded once."""
    sent = codec(rows)
    return sent.sum(0) / len(rows), [vnmse(sent, rows)]


def two_hop(rows: Array, codec: Codec, topology: Topology) -> tuple[Array, list[float]]:
    """The same with the sums of each node encoded once more."""
    nodes, ranks = topology.nodes, topology.ranks_per_node
    sent = codec(rows)
    sums = sent.reshape(nodes, ranks, *rows.shape[1:]).sum(1)  # (node, owner, S)
    again = codec(sums)
    return again.sum(0) / len(rows), [vnmse(sent, rows), vnmse(again, sums)]


def ring(rows: Array, codec: Codec, _: Topology) -> tuple[Array, list[float]]:
    """The same around a ring, on which every partial sum is encoded: the owner's neighbour starts."""
    world, owners = len(rows), np.arange(len(rows))
    partial, errors = rows[(owners + 1) % world, owners], []
    for step in range(1, world):
        sent = codec(partial)
        errors.append(vnmse(sent, partial))
        partial = sent + rows[(owners + 1 + step) % world, owners]
    return partial / world, errors


def vnmse(decoded: Array, exact: Array) -> float:
    return float(((decoded - exact) ** 2).sum() / (exact**2).sum())


ALGORITHMS: Final = {"ring": ring, "one_hop": one_hop, "two_hop": two_hop}
CODECS: Final[dict[str, Codec]] = {"int4:128": int4, "bf16": bf16}


# What trials measure


Captured = tuple[Outcome, dict[tuple[int, str], Array]]  # with a rank's gradients, by step and unit


def capturing(rank: Rank, trials: list[Trial]) -> list[Captured]:
    """Run trials one after the other."""
    return [_capture(rank, trial) for trial in trials]


def _capture(rank: Rank, trial: Trial) -> Captured:
    measure, gradients = communication_error.gradient_errors, dict[tuple[int, str], Array]()

    def keep(step: int, observer: communication_error.ReductionObserver, **options: Any) -> Any:
        gradients.update({(step, unit): total.numpy().copy() for unit, total in observer.gradients.items()})
        return measure(step, observer, **options)

    with mock.patch.object(communication_error, "gradient_errors", keep):
        return run(rank, Assignment(trial, None)), gradients


def suite_trials(corpus: str, topology: Topology) -> list[Trial]:
    """The trials of suite ``algorithms`` on one topology, of a smaller model; each once."""
    small = {
        "model": Model(name="gpt-tiny"),
        "corpus": corpus,
        "sequence": 16,
        "tokens_per_rank": 32,
        "steps": 2,
        "cluster": Cluster(nodes=topology.nodes, ranks_per_node=topology.ranks_per_node),
    }
    return [
        trial.model_copy(update={**small, "policy": trial.policy.model_copy(update={"max_padding": 9.0})})
        for trial in load(SUITES / "algorithms.toml").trials
        if trial.repeat == 0 and trial.topology() == topology
    ]


def end(record: Record, step: int, unit: str = "") -> CommunicationError:
    (error,) = (
        e
        for e in record.communication_errors
        if (e.step, e.purpose, e.unit, e.hop, e.repeated) == (step, "gradients", unit, None, 1)
    )
    return error


def ratio(error: CommunicationError) -> float:
    assert error.squared_error is not None
    assert error.squared_value
    return error.squared_error / error.squared_value


@pytest.mark.long
@pytest.mark.parametrize(
    "topology", [Topology(2, 2), pytest.param(Topology(4, 2), marks=pytest.mark.nightly)], ids=str
)
def test_plain_numpy_finds_the_errors_on_record(text: str, tmp_path: Path, topology: Topology) -> None:
    """Recorded errors of all trials of suite ``algorithms`` are within 1 % of numpy's, for hops and whole
    reductions.
    """
    trials = suite_trials(text, topology)
    assert {trial.policy.reduce for trial in trials} == set(ALGORITHMS)
    printed: dict[tuple[str, str], float] = {}
    by_rank = run_ranks(capturing, trials, local(topology, tmp_path / "log", seconds=240))
    for suite_trial, ranks in zip(trials, zip(*by_rank, strict=True), strict=True):
        record = assembled([outcome for outcome, _ in ranks], suite_trial)
        policy = suite_trial.resolved_policy()
        assert policy is not None
        codec, algorithm = CODECS[str(policy.gradients[0])], ALGORITHMS[policy.reduce]
        steps = sorted(measured_steps(suite_trial.warmup + suite_trial.steps))
        for step in steps:
            error, value = 0.0, 0.0
            for unit, _, padded in record.units:
                whole = [gradients[step, unit] for _, gradients in ranks]
                rows = np.stack(whole).astype(float).reshape(topology.world, topology.world, -1)
                assert rows[0].size == padded
                mean, hops = algorithm(rows, codec, topology)
                exact = rows.mean(0)
                assert ratio(end(record, step, unit)) == pytest.approx(vnmse(mean, exact), rel=0.01)
                measured = [
                    ratio(e)
                    for e in record.communication_errors
                    if (e.step, e.purpose, e.unit) == (step, "gradients", unit) and e.hop is not None
                ]
                assert measured == pytest.approx(hops, rel=0.01)
                error, value = error + ((mean - exact) ** 2).sum(), value + (exact**2).sum()
                flat = np.stack(whole).astype(float)
                lengths = np.linalg.norm(flat, axis=1)
                cosines = (flat @ flat.T / np.outer(lengths, lengths))[np.triu_indices(topology.world, 1)]
                assert end(record, step, unit).cosine == pytest.approx(cosines.mean(), rel=1e-6)
            assert ratio(end(record, step)) == pytest.approx(error / value, rel=0.01)
        printed[str(policy.gradients[0]), f"{policy.reduce} {policy.chunks}"] = ratio(end(record, steps[-1]))
    assert printed["int4:128", "one_hop 1"] < 0.7 * printed["int4:128", "two_hop 1"]


def dropping(sequence: int) -> Any:
    """A model with dropout and running means."""
    from torch import nn

    from harness.suites.model_sizes import GPTShape
    from harness.workloads.models import GPT

    net = GPT(GPTShape(1, 32, 2), sequence)
    net.norm = nn.Sequential(net.norm, nn.Dropout(0.5), nn.BatchNorm1d(sequence))  # type: ignore[assignment]
    return net


LOSSLESS: Final = {"max_padding": 9.0, "gradients": "int4:64"}
ROOMY: Final[dict[str, Any]] = {"policy": {"max_padding": 1e6}, "validate_every": 2}


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [
        ("zeropp", {"policy": LOSSLESS, "accumulation": 2, "clip": 1.0}),
        *long(
            ("qgz", {"policy": {**LOSSLESS, "gradients": "int4:64:stochastic", "order_every": 2}}),
            ("ddp+qgz", {"policy": LOSSLESS}),
        ),
        *[
            pytest.param(strategy, changes, marks=pytest.mark.nightly)
            for strategy, changes in (
                ("qgz", {"policy": {**LOSSLESS, "feedback": "loco"}}),
                ("zeropp", {"policy": {**LOSSLESS, "offload_optimizer": 0.5, "offload_weights": 0.5}}),
                ("zero1", {"policy": {**LOSSLESS, "compute": "fp16", "loss_scale": "dynamic:from1024"}}),
                ("fsdp2+qwz+qgz", {"policy": {"gradients": "int4:64"}}),
                *((name, {"model": {"name": f"{__name__}:dropping"}}) for name in ("zero3", "ddp+bf16")),
            )
        ],
    ],
)
def test_measuring_changes_no_step(text: str, tmp_path: Path, strategy: str, changes: dict[str, Any]) -> None:
    """Losses, norms, validations, ledgers, predictions, memory and copies are bit-equal with and without measuring."""
    plain, measured = (
        result(trial(text, strategy, **ROOMY | changes, measure_quantisation=on), tmp_path / "log")
        for on in (False, True)
    )
    assert not plain.communication_errors
    assert {e.step for e in measured.communication_errors} == {0, 2, 4}
    for rank, same in zip(plain.ranks, measured.ranks, strict=True):
        losses, again = ([(s.loss, s.gradient_norm) for s in steps] for steps in (rank.steps, same.steps))
        assert losses == again
        assert rank.ledger == same.ledger
        assert rank.memory.engine == same.memory.engine
        assert rank.memory.copied == same.memory.copied
    assert plain.predicted == measured.predicted
    validated, again = ([(v.loss, v.inter_bytes) for v in run.validations] for run in (plain, measured))
    assert validated == again


def test_weights_err_as_their_codec_also_from_the_copy(text: str, tmp_path: Path) -> None:
    """In fp32 only the rounding of sums errs; in int8 weights err, and hpZ's copy exactly as much."""
    exact = result(trial(text, "exact", measure_quantisation=True), tmp_path / "log")
    for error in exact.communication_errors:
        assert ratio(error) <= (0 if error.purpose == "weights" else 1e-12)
    policy = {**LOSSLESS, "weights": "int8:64"}
    record = result(trial(text, "zeropp", policy=policy, measure_quantisation=True), tmp_path / "log")
    weights, copies = (
        [e for e in record.communication_errors if e.purpose == purpose]
        for purpose in ("weights", "secondary")
    )
    assert len(weights) == 3 * 4
    assert all(error.codec == "int8:64" and 1e-7 < ratio(error) < 1e-4 for error in weights)
    assert [copy.model_copy(update={"purpose": "weights"}) for copy in copies] == weights


@pytest.mark.long
def test_feedback_errs_more_in_a_step_and_less_over_steps(text: str, tmp_path: Path) -> None:
    """With feedback the error of one step is larger, and the error of the mean of eight reductions far smaller."""
    plain, carried = (
        result(
            trial(text, "qgz", policy={**LOSSLESS, "feedback": feedback}, measure_quantisation=True),
            tmp_path / "log",
        )
        for feedback in ("none", "classic:all")
    )
    assert ratio(end(carried, 0)) == ratio(end(plain, 0))  # nothing is carried yet
    assert ratio(end(carried, 4)) > 1.3 * ratio(end(plain, 4))
    (summed,) = (e for e in carried.communication_errors if e.repeated > 1 and not e.unit)
    assert (summed.step, summed.repeated) == (4, communication_error.REPEATED)
    assert ratio(summed) < 0.1 * ratio(end(plain, 4))
    assert not [e for e in plain.communication_errors if e.repeated > 1]


@pytest.mark.parametrize("strategy", ["mics", "zero0", "ddp+qgz"])
def test_what_other_groups_send_is_part_of_the_error(text: str, tmp_path: Path, strategy: str) -> None:
    """If the mean is encoded again for other groups, that counts as a hop and is part of the error."""
    record = result(trial(text, strategy, policy=LOSSLESS, measure_quantisation=True), tmp_path / "log")
    hops = [e for e in record.communication_errors if e.step == 0 and e.hop is not None and not e.unit]
    assert [e.hop for e in hops] == [0, 1, 2]
    assert ratio(end(record, 0)) > 1.3 * max(ratio(e) for e in hops)


def test_sums_of_ranks_make_one_error() -> None:
    """Sums add up over ranks and units; zeros have no error, nor have infinities and NaN.  Cosines of equal
    gradients are 1, of opposite ones -1; a rank without any has none.
    """
    for products, cosine in (([4.0, 2, 2, 1], 1), ([4.0, -2, -2, 1], -1), ([4.0, 0, 0, 0], None)):
        assert mean_cosine(np.array(products)) == (cosine and pytest.approx(cosine))
    place = Place(3, "gradients", "a")
    small, large = (np.array([error, 10.0, 4.0, 1.0, 1.0, 1.0]) for error in (1.0, 3.0))
    empty, lost = place._replace(unit="b"), place._replace(unit="c", step=4)
    zeros = np.zeros(6)
    ranks = [{place: small, empty: zeros}, {place: large, empty: zeros, lost: np.array([np.nan, np.inf])}]
    errors = {(e.step, e.unit): e for e in combine(ranks)}
    assert set(errors) == {(3, "a"), (3, ""), (4, "c"), (4, "")}
    assert (errors[3, "a"].squared_error, errors[3, "a"].squared_value) == (4.0, 20.0)
    assert errors[3, "a"].cosine == pytest.approx(0.5)
    assert (errors[4, "c"].squared_error, errors[4, "c"].squared_value) == (None, None)


@given(
    mean=st.floats(0.5, 2.0),
    spread=st.sampled_from([0.0, 1e-4, 1e-2]),
    seed=st.integers(0, 2**32 - 1),
    stale=st.booleans(),
)
@example(mean=1.30238, spread=0.0, seed=0, stale=False)
def test_a_correct_copy_of_equal_weights_is_not_refused(
    mean: float, spread: float, seed: int, stale: bool
) -> None:
    """The copy's rounding may err in the direction in which the codec errs, as in a norm's weights, almost all equal.

    A copy of other weights is refused as before.
    """
    policy = preset("zeropp", weights=parse("int8:256:clip"), secondary_format="bf16")
    draw = torch.Generator().manual_seed(seed)
    weights = mean + spread * torch.randn((1, 256), generator=draw)
    gathered = through(policy.weights, weights)
    copied = (gathered + 0.05 * mean if stale else gathered).bfloat16().float()
    errors = combine(
        [
            {
                Place(7, purpose, "norm", codec=str(policy.weights)): communication_error.squared_sums(
                    values, weights
                )
                for purpose, values in (("weights", gathered), ("secondary", copied))
            }
        ]
    )
    refused = communication_error.refusal(errors, policy, ranks=4)
    assert (refused is not None and "but the vNMSE of the copied weights is" in refused) == stale


@pytest.mark.gpu
def test_weights_of_offloaded_masters_are_measured_on_the_gpu() -> None:
    """Masters in host memory are compared with the weights that were gathered on the device."""
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
    try:
        mesh = Mesh.create(Topology(1, 1), torch.device("cuda", 0))
        policy = preset("zero3", offload=Offload(optimizer=1.0))
        errors = communication_error.weight_errors(0, shard(model().to("cuda"), mesh=mesh, policy=policy))
        assert errors
        assert all(squared < 2.0**-14 * value for squared, value in errors.values())
    finally:
        dist.destroy_process_group()
