"""Snapshots hold what training has, and formats are ranked by their errors on snapshots."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from typer.testing import CliRunner

from harness.cli import app
from harness.errors import Refusal
from harness.lab import command, formats
from harness.lab.formats import Unit, agreement, budget_lines, choose_codecs, measure, rank_codecs, units_of
from harness.lab.snapshot import take
from harness.suites.suite_file import load
from harness.suites.trial import Cluster, Model, Trial
from tests.report.records import ending_at

TINY = Trial(
    strategy="zeropp", cluster=Cluster(rate=None), model=Model(name="gpt-tiny"), sequence=16,
    tokens_per_rank=32, steps=3, warmup=0,
)  # fmt: skip


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lab") / "s.safetensors"
    take(TINY, [0, 2], path, lambda _: None)
    return path


def test_a_snapshot_is_what_training_has(snapshot: Path) -> None:
    """A snapshot has every kind of values of every unit at every chosen step, and the values are those of training."""
    units, sizes = units_of(snapshot)
    assert sizes == (2, 2)
    assert {unit.kind for unit in units} == {"weights", "changes", "gradients"}
    assert len(units) == 3 * 2 * len({unit.name.partition("@")[0] for unit in units})
    for unit in units:
        if unit.kind == "gradients":
            assert len(unit.x) == 4
            assert not torch.equal(unit.x[0], unit.x[1])
        if unit.kind == "changes" and unit.name.endswith("@0"):
            rate = float(TINY.optimizer.arguments["lr"])
            assert float(unit.x.abs().max()) == pytest.approx(rate, rel=0.1)


def test_steps_that_a_trial_lacks_are_refused(tmp_path: Path) -> None:
    """A step beyond the last one is refused by its number."""
    with pytest.raises(Refusal, match="expected numbers from 0 to 2"):
        take(TINY, [3], tmp_path / "s", lambda _: None)


@pytest.mark.parametrize(("steps", "kept"), [(4, [0]), (19, [0]), (20, [0, 20]), (50, [0, 20, 50])])
def test_by_default_steps_are_kept_as_far_as_a_trial_goes(
    steps: int, kept: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the default steps, those that the trial has are saved: of a trial of five steps, the first."""
    suite, taken = tmp_path / "q.toml", list[list[int]]()
    lines = ["name = 'q'", "question = 'Why?'", "[defaults]", f"steps = {steps}", "warmup = 1"]
    suite.write_text("\n".join([*lines, "[matrix]", "strategy = ['zero3']"]))
    monkeypatch.setattr("harness.lab.snapshot.take", lambda _, steps, *__: taken.append(list(steps)))
    command.snapshot(suite, load(suite).trials[0].id, tmp_path / "s.safetensors", None)
    assert taken == [kept]


def test_formats_are_ranked_by_their_errors(snapshot: Path) -> None:
    """More bits err less, for every kind of values; the bits are those of frames, and unbiased codecs have no bias."""
    codecs = rank_codecs(measure(*units_of(snapshot), ["int2:128", "int4:128", "int8:128", "fp32"]))
    for kind in ("weights", "changes", "gradients"):
        rows = codecs[codecs["kind"] == kind]
        assert [*rows["codec"]] == ["fp32", "int8:128", "int4:128", "int2:128"]
        assert rows["vnmse"].iloc[0] < 1e-13
        assert rows["cosine"].iloc[0] == pytest.approx(1)
        assert rows["bits"].iloc[1] == pytest.approx(8.25, abs=0.2)


def test_formats_without_loss_take_the_bits_that_they_use(snapshot: Path) -> None:
    """Without loss there is no error, or bf16's; a weight in bf16 takes about 8 bits and its exponent's entropy."""
    units, sizes = units_of(snapshot)
    codecs = rank_codecs(measure(units, sizes, ["bf16", "lossless:zlib", "lossless:zlib:bf16"]))
    for kind, rows in codecs.set_index("codec").groupby("kind"):
        assert rows["vnmse"]["lossless:zlib"] < 1e-13
        assert rows["vnmse"]["lossless:zlib:bf16"] == pytest.approx(rows["vnmse"]["bf16"], rel=1e-6)
        cast, whole = rows["bits"]["lossless:zlib:bf16"], rows["bits"]["lossless:zlib"]
        assert 0 < cast < 15
        assert cast < whole < 31
        if kind == "weights":  # changes are of equal size, and units of gradients differ in their exponents
            assert cast > 0.85 * formats.lossless_bits(units, "weights")


@given(st.integers(0, 2**32 - 1), st.sampled_from([(1, 4), (2, 2), (4, 1)]))
def test_reductions_of_equal_gradients_err_as_one_or_two_encodings(seed: int, sizes: tuple[int, int]) -> None:
    """If all ranks have equal gradients, the error is at most that of one encoding for each hop."""
    row = torch.randn(500, generator=torch.Generator().manual_seed(seed))
    rows = measure([Unit("gradients", "u@0", row.expand(4, -1).contiguous())], sizes, ["int8:shard"])
    hops = 1 if sizes[0] == 1 else 2
    step = float(row.abs().max()) / 127
    assert rows["error"].sum() <= 500 * (hops * 0.51 * step) ** 2


def test_a_budget_of_snapshots_is_kept(snapshot: Path) -> None:
    """The chosen codecs stay within the budget, and err no more than the best single codec with as many bytes."""
    texts = ["int2:128", "int3:128", "int4:128", "nf4", "mxfp6e2m3", "int8:128"]
    measured = measure(*units_of(snapshot), texts)
    tried = 0
    for bits in (2.5, 3.0, 4.0, 4.6, 5.0, 6.0, 7.0):
        for kind in ("weights", "changes", "gradients"):
            rows = measured[measured["kind"] == kind]
            codecs, (_, cost) = rank_codecs(rows), choose_codecs(rows, bits)
            tried += 1
            assert 8 * cost.bytes <= bits * codecs["elements"].iloc[0]
            uniform = codecs["error"][codecs["bits"] <= bits]
            assert uniform.empty or cost.error <= uniform.min() * (1 + 1e-9)
    assert tried >= 20
    assert "bits: vNMSE" in next(iter(budget_lines(measured, 4.0)))
    with pytest.raises(Refusal) as refusal:
        list(budget_lines(measured, 1.0))
    match = re.fullmatch(
        r"--bits 1: even with the smallest codec for each unit, (\S+) bits are needed for each element of (\w+): give "
        r"--bits \1 or more, or name a codec of fewer bits with --codec",
        str(refusal.value),
    )
    assert match is not None
    least, rows = float(match[1]), measured[measured["kind"] == match[2]]
    assert choose_codecs(rows, least)
    with pytest.raises(Refusal, match=f"give --bits {match[1]} or more"):
        choose_codecs(rows, least - 0.01)


@given(st.integers(-100, 100), st.integers(1, 4))
def test_lossless_bits_are_8_and_the_entropy_of_exponents(exponent: int, kinds: int) -> None:
    """With 2^k equally likely exponents a value takes 8 + k bits, whatever the exponents, signs and zeros."""
    values = torch.cat(
        [torch.full((6,), (-1.5) ** (e % 2) * 2.0 ** (exponent + 2 * e)) for e in range(2**kinds)]
    )
    unit = Unit("weights", "u", torch.cat([values, torch.zeros(9)]))
    assert formats.lossless_bits([unit], "weights") == pytest.approx(8 + kinds)


def test_any_safetensors_file_is_measured(tmp_path: Path) -> None:
    """Tensors with other names count as weights, integers are left out, and other files are refused."""
    path = tmp_path / "own.safetensors"
    save_file({"layer.w": torch.randn(8, 8), "ids": torch.arange(3), "gradients/x": torch.randn(3, 40)}, path)
    units, sizes = units_of(path)
    assert sizes == (1, 3)
    assert [(unit.kind, unit.name, tuple(unit.x.shape)) for unit in units] == [
        ("gradients", "x", (3, 40)), ("weights", "layer.w", (64,)),
    ]  # fmt: skip
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(Refusal, match="text"):
        units_of(tmp_path / "text")


def test_the_ranking_is_compared_with_committed_losses(snapshot: Path) -> None:
    """The rank correlation uses the committed losses of suite formats; with too few codecs it is refused."""
    texts = ["int8:128", "fp8e4m3:128", "mxfp8", "int4:128", "int4:128:clip", "mxfp4", "int4:128:hadamard32"]
    codecs = rank_codecs(measure(*units_of(snapshot), texts))
    ranks = agreement(codecs, Path(__file__).parents[3] / "results" / "reference" / "formats.tar.xz")
    assert -1 <= ranks.low <= ranks.correlation <= ranks.high <= 1
    assert (ranks.codecs, ranks.seeds) == (7, 6)
    with pytest.raises(Refusal, match="a rank correlation needs at least 5"):
        agreement(codecs[:2], Path(__file__).parent)


def test_losses_of_unlike_settings_are_not_ranked_together() -> None:
    """Records of two models, or of two numbers of nodes, are two sets, also with equal strategy, codecs and rate."""
    trials = [
        TINY,
        TINY.model_copy(update={"seed": 7}),
        TINY.model_copy(update={"model": Model(name="gpt-small")}),
        TINY.model_copy(update={"cluster": Cluster(nodes=4, rate=None)}),
    ]
    losses = formats._losses([ending_at(trial, 3.0) for trial in trials])
    first, seed, model, nodes = (kind for kind, *_ in losses)
    assert first == seed
    assert len({first, model, nodes}) == 3


def test_the_commands_print_a_table(snapshot: Path) -> None:
    """The command prints a ranking, also as CSV, and refuses an unknown codec with status 2."""
    arguments = ["bench", "formats", str(snapshot), "--codec", "nvfp4", "--codec", "int8:64", "--csv"]
    printed = CliRunner().invoke(app, arguments)
    assert printed.exit_code == 0, printed.output
    head, *rows = printed.output.strip().splitlines()
    assert head.startswith("values,codec,bits,vnmse,bias,cosine")
    assert len(rows) == 6
    assert formats.CODECS[0] == "bf16"
