"""Predictions of loss differences are registered before their sizes run, cover what they should, and are judged."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from scipy import stats

from docs.tables import ladder as module
from docs.tables.ladder import (
    AXES,
    EARLY,
    INSIDE,
    OPEN,
    OUTSIDE,
    PAGE,
    PREDICTIONS,
    Axis,
    Kept,
    Ladder,
    Registered,
    as_toml,
    draw,
    ladders,
    page,
    planned,
    register,
    registered_in,
    verdict,
)
from docs.tables.ladder_fit import Fit, Point, rungs
from harness.errors import Refusal
from harness.records.chained_journal import content_of
from harness.records.trial_record import Record, Validation, write
from harness.suites.suite import SuiteError
from harness.suites.trial import Trial
from tests.report.records import CODE, CRASHED, MACHINE, POOL

SIZES: Final = {32: 45_216, 48: 86_256, 64: 139_584, 96: 393_888, 128: 869_504}  # parameters by width
PLUS: Final = "ZeRO++"
BEGAN: Final = datetime(2026, 1, 2, 3, tzinfo=UTC)
BY_SIZE: Final = AXES[0]


def trial_of(strategy: str, width: int, seed: int, **fields: Any) -> Trial:
    model = {"name": "gpt-tiny", "arguments": {"layers": 2, "width": width, "heads": 2}}
    cluster = {"nodes": 2, "ranks_per_node": 2, "ranks": "threads"}
    usual = {"strategy": strategy, "seed": seed, "steps": 10 * width, "warmup": 0, "validate_every": 100}
    return Trial.model_validate({"model": model, "cluster": cluster} | usual | fields)


def record(
    trial: Trial, loss: float, *, suite: str = "ladder", began: datetime = BEGAN, **fields: Any
) -> Record:
    """A record without steps, whose validation losses fall from 5 to ``loss``."""
    curve = [
        Validation(step=step, loss=value, train_seconds=0.0, inter_bytes=None)
        for step, value in ((1, 5.0), (trial.steps, loss))
    ]
    width = int(trial.model.arguments.get("width", 64))
    usual: dict[str, Any] = {
        "id": trial.id, "suite": suite, "trial": trial.canonical(), "started": began.isoformat(),
        "finished": began.isoformat(), "order": 0, "machine": MACHINE, "code": CODE, "pool": POOL, "failure": None,
        "parameters": SIZES[width], "validations": curve,
    }  # fmt: skip
    return Record(**usual | fields)


def pairs(width: int, differences: Sequence[float], **fields: Any) -> list[Record]:
    """ZeRO-3 and ZeRO++ of one size, with these differences by seed; ZeRO-3's loss differs between seeds."""
    return [
        record(
            trial_of(strategy, width, seed),
            2.0 + 0.1 * seed + (difference if strategy == "zeropp" else 0.0),
            **fields,
        )
        for seed, difference in enumerate(differences)
        for strategy in ("zero3", "zeropp")
    ]


def kept(records: Sequence[Record]) -> dict[str, Kept]:
    return {each.id: Kept(each, content_of(each)) for each in records}


def ladder_of(records: Sequence[Record], registered: Sequence[Registered] = ()) -> Ladder:
    return Ladder.of(BY_SIZE, kept(records), registered)


def small_sizes() -> list[Record]:
    """Three sizes, at which ZeRO++'s difference falls from 0.03 to 0.02 nats."""
    return [
        *pairs(32, (0.029, 0.031, 0.030, 0.032, 0.028, 0.030)),
        *pairs(48, (0.024, 0.026, 0.025, 0.027, 0.023, 0.025)),
        *pairs(64, (0.019, 0.021, 0.020, 0.022, 0.018, 0.020)),
    ]


def registered_from(records: Sequence[Record]) -> Registered:
    """The registration of ZeRO++ at the two larger sizes, an hour after the small ones began."""
    plan = {(PLUS, SIZES[32]): 6, (PLUS, SIZES[96]): 4, (PLUS, SIZES[128]): 2}
    return register(
        ladder_of(records), plan, BEGAN + timedelta(hours=1), {SIZES[width] for width in (32, 48, 64)}
    )


def later(width: int, differences: Sequence[float]) -> list[Record]:
    """Records of a size that began after the registration."""
    return pairs(width, differences, began=BEGAN + timedelta(hours=2))


# Rungs


def test_a_known_difference_is_recovered() -> None:
    """Differences are paired by seed, and come with the size, tokens and ranks of their trials."""
    differences = (0.01, 0.02, 0.03, 0.04, 0.05, 0.06)
    (rung,) = rungs(pairs(64, differences), "ladder")
    assert (rung.configuration, rung.parameters, str(rung.topology)) == (PLUS, SIZES[64], "2x2")
    assert rung.tokens == 640 * 4 * 512
    assert rung.seeds == (0, 1, 2, 3, 4, 5)
    assert rung.differences == pytest.approx(differences)
    expected = stats.t.interval(0.95, 5, np.mean(differences), stats.sem(differences))
    assert (rung.interval.low, rung.interval.high) == pytest.approx(expected)
    assert rung.base_loss == pytest.approx(2.25)


def test_a_seed_without_its_baseline_does_not_count() -> None:
    """Failed trials, and seeds that only one side has, are left out; repeats of a seed count once."""
    records = [
        *pairs(64, (0.01, 0.03)),
        record(trial_of("zeropp", 64, 7), 9.0),
        record(trial_of("zeropp", 64, 8), 9.0, failure=CRASHED),
        record(trial_of("zeropp", 64, 1, repeat=1), 2.15),
    ]
    (rung,) = rungs(records, "ladder")
    assert rung.seeds == (0, 1)
    assert rung.differences == pytest.approx((0.01, 0.04))


def test_how_ranks_run_changes_no_loss() -> None:
    """ZeRO-3 of another suite is the baseline, though its ranks are processes and its model is named without sizes."""
    cluster = {"nodes": 2, "ranks_per_node": 2, "link": "none"}
    other = {"suite": "convergence_long", "began": BEGAN - timedelta(days=1)}
    elsewhere = [
        record(trial_of("zero3", 64, 0, model={"name": "gpt-tiny"}, cluster=cluster), 2.0, **other),
        record(trial_of("zeropp", 64, 0, cluster=cluster, control="late_secondary"), 3.0, **other),
    ]
    here = record(trial_of("zeropp", 64, 0), 2.5)
    (rung,) = rungs([here, *elsewhere], "ladder")
    assert rung.configuration == PLUS
    assert rung.differences == pytest.approx((0.5,))
    assert datetime.fromisoformat(rung.began) == BEGAN - timedelta(days=1)


@pytest.mark.parametrize(
    "fields",
    [
        {"steps": 641},
        {"optimizer": {"arguments": {"lr": 1e-4}}},
        {"cluster": {"nodes": 4, "ranks": "threads"}},
    ],
    ids=["steps", "rate", "ranks"],
)
def test_other_training_is_not_compared(fields: dict[str, Any]) -> None:
    """A baseline of other steps, another learning rate or other ranks is no baseline."""
    records = [record(trial_of("zero3", 64, 0, **fields), 2.0), record(trial_of("zeropp", 64, 0), 2.5)]
    assert rungs(records, "ladder") == []


def test_a_loss_that_is_not_finite_is_refused() -> None:
    """A diverged trial is not left out, which would flatter its configuration."""
    records = [record(trial_of("zero3", 64, 0), 2.0), record(trial_of("zeropp", 64, 0), math.inf)]
    with pytest.raises(Refusal, match=r"record \w+ of suite ladder: expected a finite loss"):
        rungs(records, "ladder")


# Fit


def test_a_loss_before_the_end_is_refused() -> None:
    """If ``validate_every`` does not divide the steps, the last validation is no final loss."""
    trial, steps = (
        trial_of("zeropp", 64, 0),
        [Validation(step=600, loss=2.5, train_seconds=0.0, inter_bytes=None)],
    )
    records = [record(trial_of("zero3", 64, 0), 2.0), record(trial, 2.5, validations=steps)]
    with pytest.raises(
        Refusal, match=r"record \w+ of suite ladder: expected a finite loss of a validation at its end"
    ):
        rungs(records, "ladder")


def drawn(truth: Callable[[int], float], noise: float, random: np.random.Generator) -> Fit:
    """A fit of the four smaller sizes, with 8, 8, 8 and 4 seeds of normal differences around ``truth``."""
    sizes = zip([*SIZES.values()][:4], (8, 8, 8, 4), strict=True)
    return Fit(
        tuple(Point.of(at, list(truth(at) + noise * random.standard_normal(seeds))) for at, seeds in sizes)
    )


def test_the_line_is_that_of_all_seeds() -> None:
    """Slope, its interval, and the interval of a prediction are those of a regression over single seeds."""
    random = np.random.default_rng(0)
    by_size = {
        at: list(0.02 * random.standard_normal(n))
        for at, n in zip(SIZES.values(), (8, 8, 6, 4, 2), strict=True)
    }
    fit = Fit(tuple(Point.of(at, found) for at, found in by_size.items()))
    x = np.log10([at for at, found in by_size.items() for _ in found])
    y = np.array([each for found in by_size.values() for each in found])
    line = stats.linregress(x, y)
    reach = stats.t.ppf(0.975, len(x) - 2)
    assert fit.slope.estimate == pytest.approx(line.slope)
    assert fit.slope.high - line.slope == pytest.approx(reach * line.stderr)
    found = fit.predict(1e9, 3)
    assert found.line == pytest.approx(line.intercept + 9 * line.slope)
    residual = np.sum((y - line.intercept - line.slope * x) ** 2) / (len(x) - 2)
    leverage = 1 / 3 + 1 / len(x) + (9 - x.mean()) ** 2 / np.sum((x - x.mean()) ** 2)
    assert found.high - found.line == pytest.approx(reach * math.sqrt(residual * leverage))
    assert found.constant == pytest.approx(y.mean())


def test_a_straight_line_without_noise_is_predicted_exactly() -> None:
    """On a line of slope 2 all three numbers follow; the constant form widens the interval towards the mean."""
    fit = Fit(tuple(Point(10**power, 4, 2.0 * power, 0.0) for power in (1, 2, 3)))
    found = fit.predict(10**5, 4)
    assert (found.line, found.high) == pytest.approx((10.0, 10.0))
    assert found.constant == pytest.approx(4.0)
    assert found.low < 4.0


@pytest.mark.parametrize(
    "truth",
    [
        lambda _: 0.02,
        lambda at: 0.05 - 0.006 * math.log10(at),
        lambda at: 0.3 * at**-0.25,
        lambda at: 0.001 * at**0.25,
    ],
    ids=["constant", "line", "falling power law", "rising power law"],
)
def test_intervals_cover_the_next_size(truth: Callable[[int], float]) -> None:
    """The interval holds the mean of two seeds at the next size in 95 % of draws or more, whichever form is true."""
    random, inside, draws, at = np.random.default_rng(1), 0, 1000, SIZES[128]
    for _ in range(draws):
        found = drawn(truth, 0.016, random).predict(at, 2)
        inside += found.low <= truth(at) + 0.016 * random.standard_normal(2).mean() <= found.high
    assert inside / draws > 0.95 - 2 * math.sqrt(0.95 * 0.05 / draws)


def test_intervals_are_not_wider_than_seeds_and_forms_make_them() -> None:
    """Of equal seeds and no trend, the interval misses some draws, and it widens with the distance."""
    random, draws, at = np.random.default_rng(2), 1000, SIZES[128]
    fits = [drawn(lambda _: 0.02, 0.016, random) for _ in range(draws)]
    found = [fit.predict(at, 2) for fit in fits]
    missed = [not each.low <= 0.02 + 0.016 * random.standard_normal(2).mean() <= each.high for each in found]
    assert np.mean(missed) > 0.005
    further = [fit.predict(13_000_000_000, 2) for fit in fits]
    assert all(far.high - far.low > near.high - near.low for far, near in zip(further, found, strict=True))


def test_two_sizes_bear_no_fit() -> None:
    """A line through two sizes would leave nothing that shows whether a line fits."""
    with pytest.raises(ValueError, match="a fit needs 3 different sizes, got 2 points"):
        Fit((Point(10, 8, 0.1, 0.1), Point(100, 8, 0.1, 0.1)))


# Registrations


def test_a_registration_predicts_what_has_not_run() -> None:
    """It has a prediction for each size without records, and names the records and the code that it rests on."""
    records = small_sizes()
    found = registered_from(records)
    assert [(each.at, each.seeds) for each in found.predictions] == [(SIZES[96], 4), (SIZES[128], 2)]
    assert [(point.at, point.seeds) for point in found.points] == [
        (SIZES[width], 6) for width in (32, 48, 64)
    ]
    assert found.records == sorted(each.id for each in records)
    assert found.commits == ["c0ffee"]
    assert all(each.low < each.line < each.constant < each.high for each in found.predictions)


def test_a_size_with_records_is_not_predicted() -> None:
    """If every planned size has records, one line says so; one finished trial of any configuration is enough."""
    ladder, moment = ladder_of(small_sizes()), BEGAN
    plan = {(PLUS, SIZES[64]): 6, (PLUS, SIZES[96]): 4}
    with pytest.raises(Refusal, match=r"there are records of every size \(139,584 and 393,888 parameters\)"):
        register(ladder, plan, moment, [SIZES[64], SIZES[96]])
    (prediction,) = register(ladder, plan, moment, [SIZES[64]]).predictions
    assert prediction.at == SIZES[96]


def test_a_prediction_is_registered_once() -> None:
    """A further registration of a size is refused, whatever has run since; another size may be added."""
    first = registered_from(small_sizes())
    ladder = ladder_of([*small_sizes(), *later(96, (0.01, 0.02))], [first])
    known = [SIZES[width] for width in (32, 48, 64, 96)]
    with pytest.raises(Refusal, match=r"ZeRO\+\+ with 869,504 parameters was predicted on 2026-01-02"):
        register(ladder, {(PLUS, SIZES[128]): 2}, BEGAN, known)
    (further,) = register(ladder, {(PLUS, 2_000_000): 2}, BEGAN, known).predictions
    assert further.at == 2_000_000


def test_too_few_sizes_are_refused() -> None:
    """A configuration with records of two sizes cannot be predicted."""
    ladder = ladder_of([*pairs(32, (0.1, 0.2)), *pairs(48, (0.1, 0.2))])
    with pytest.raises(Refusal, match=r"ZeRO\+\+ has records of 2 sizes, and a fit needs 3"):
        register(ladder, {(PLUS, SIZES[64]): 2}, BEGAN, [SIZES[32], SIZES[48]])


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    """The file of predictions holds registrations one after the other, with the moment and every number."""
    path, each = tmp_path / "predictions.toml", registered_from(small_sizes())
    path.write_text(as_toml(each) + "\n" + as_toml(each), encoding="utf-8")
    assert registered_in(path) == [each, each]
    assert registered_in(tmp_path / "missing.toml") == []


def test_plans_are_those_of_the_suite_files() -> None:
    """Seeds are counted by configuration and by the number of ranks, or of parameters."""
    ranks = planned(AXES[1])
    assert {at for _, at in ranks} == {4, 16, 128}
    assert {name for name, _ in ranks} == {"ZeRO++ (w int8:256)", "ZeRO++ (w int8:256, g int8:256:clip)"}
    assert {*ranks.values()} == {6}
    assert planned(replace(BY_SIZE, suite="convergence_long"))[PLUS, SIZES[64]] == 8


# Outcomes and the page


def test_a_wrong_prediction_is_called_wrong() -> None:
    """An outcome is judged by the registered interval; without records, or if it began too early, it is not judged."""
    each = registered_from(small_sizes())
    near, far = each.predictions
    ladder = ladder_of([*small_sizes(), *later(96, (0.012, 0.014) * 2), *later(128, (0.2, 0.3))], [each])
    assert verdict(near, ladder.outcome(near), each.moment) == INSIDE
    assert verdict(far, ladder.outcome(far), each.moment) == OUTSIDE
    assert verdict(far, ladder_of(small_sizes()).outcome(far), each.moment) == OPEN
    partly = ladder_of([*small_sizes(), *later(128, (0.2,))])
    assert verdict(far, partly.outcome(far), each.moment) == "not judged yet: 1 of 2 seeds"
    early = ladder_of([*small_sizes(), *pairs(128, (0.01, 0.01))])
    assert verdict(far, early.outcome(far), each.moment) == EARLY


def row_of(text: str, at: int) -> str:
    (row,) = [line for line in text.splitlines() if line.startswith(f"| {PLUS} | {at:,} parameters |")]
    return row


def test_the_page_shows_predictions_and_outcomes_side_by_side() -> None:
    """Measured sizes stand beside their predictions, right or wrong; others are not measured yet."""
    records, each = small_sizes(), registered_from(small_sizes())
    ranks = Ladder.of(AXES[1], {}, [])
    before = page([ladder_of(records, [each]), ranks])
    assert row_of(before, SIZES[128]).count(OPEN) == 2
    assert "None of them is judged yet." in before
    assert "the committed archives hold these records unchanged" in " ".join(before.split())
    after = page(
        [
            ladder_of([*records, *later(96, (0.013, 0.013, 0.012, 0.014)), *later(128, (0.2, 0.3))], [each]),
            ranks,
        ]
    )
    assert row_of(after, SIZES[96]).endswith(f"| +0.0130 | {INSIDE} |")
    assert row_of(after, SIZES[128]).endswith(f"| +0.2500 | {OUTSIDE} |")
    assert "Of 2 judged predictions, 1 came out inside the interval and 1 outside" in " ".join(after.split())


def test_records_that_changed_since_the_registration_are_named() -> None:
    """The page says if the records behind a prediction are not those that are committed."""
    each, ranks = registered_from(small_sizes()), Ladder.of(AXES[1], {}, [])
    others = [*pairs(32, (0.1,) * 6), *small_sizes()[12:]]
    changed = " ".join(page([ladder_of(others, [each]), ranks]).split())
    assert "hold other records of some of these trials" in changed
    without = " ".join(page([ladder_of([], [each]), ranks]).split())
    assert "the records are not committed yet" in without


def test_a_page_without_records_says_so() -> None:
    """Without records there are no tables, figures or predictions."""
    text = page([Ladder.of(axis, {}, []) for axis in AXES])
    assert "No records of [ladder](../suites/README.md) are committed yet." in text
    assert "No prediction is registered yet." in text
    assert "| " not in text
    assert "figures/" not in text


def test_the_figure_has_a_panel_for_each_configuration(tmp_path: Path) -> None:
    """The same records give the same bytes, with a registered interval and without."""
    each = registered_from(small_sizes())
    for registered in ([], [each]):
        ladder = ladder_of(small_sizes(), registered)
        for name in ("first", "second"):
            draw(ladder, tmp_path / name)
        assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()
        assert (tmp_path / "first").stat().st_size > 5000


# The command


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A results folder with the small sizes; nothing is committed, and the plan has the larger ones."""
    for each in small_sizes():
        write(tmp_path / "results" / "ladder", each)
    plan = {(PLUS, SIZES[96]): 4, (PLUS, SIZES[128]): 2}
    values: Mapping[str, Any] = {
        "PREDICTIONS": tmp_path / "predictions.toml",
        "committed": lambda _: {},
        "planned": lambda _: plan,
    }
    for name, value in values.items():
        monkeypatch.setattr(module, name, value)
    return tmp_path / "results"


def test_the_command_registers_once(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first call writes the file of predictions, the second is refused in one line and changes nothing."""
    assert module.main(["register", str(results)]) == 0
    written = module.PREDICTIONS.read_text(encoding="utf-8")
    (each,) = tomllib.loads(written)["registered"]
    assert [prediction["at"] for prediction in each["predictions"]] == [SIZES[96], SIZES[128]]
    assert module.main(["register", str(results / "ladder")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert module.PREDICTIONS.read_text(encoding="utf-8") == written


@pytest.mark.parametrize("width", [96, 128])
def test_the_command_leaves_out_sizes_with_records(results: Path, width: int) -> None:
    """One finished trial of a size, here ZeRO-3's, takes it out of what is predicted."""
    write(results / "ladder", record(trial_of("zero3", width, 0), 2.0))
    assert module.main(["register", str(results)]) == 0
    (each,) = registered_in(module.PREDICTIONS)
    assert [prediction.at for prediction in each.predictions] == [SIZES[224 - width]]


def test_the_command_leaves_out_sizes_with_committed_records(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A size that was measured before is not predicted, though its records are not in the folder."""
    before = {"ladder": kept([record(trial_of("zero3", 96, 0), 2.0)])}
    monkeypatch.setattr(module, "committed", lambda suite: before.get(suite, {}))
    assert module.main(["register", str(results)]) == 0
    (each,) = registered_in(module.PREDICTIONS)
    assert [prediction.at for prediction in each.predictions] == [SIZES[128]]


@pytest.mark.parametrize("text", ["[[registered]", "[[registered]]\nsuite = 1\n", None])
def test_a_wrong_file_of_predictions_is_named(
    results: Path, text: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that is no TOML, an entry without its fields, and a moment without a zone end the command in one line."""
    if text is None:
        text = as_toml(registered_from(small_sizes())).replace("+00:00", "")
    module.PREDICTIONS.write_text(text, encoding="utf-8")
    assert module.main(["register", str(results)]) == 2
    assert (line := capsys.readouterr().err).startswith(f"docs.tables.ladder: {module.PREDICTIONS}: ")
    assert line.count("\n") == 1
    assert module.PREDICTIONS.read_text(encoding="utf-8") == text


def test_two_trainings_of_one_size_are_refused(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Records of another training of a size, such as of fewer steps, are neither fitted nor taken as its outcome."""
    for strategy in ("zero3", "zeropp"):
        write(results / "ladder", record(trial_of(strategy, 64, 0, steps=7), 2.0))
    assert module.main(["register", str(results)]) == 2
    assert "ZeRO++ with 139,584 parameters has records of 2 trainings" in capsys.readouterr().err
    assert not module.PREDICTIONS.exists()


def test_the_command_refuses_folders_without_records(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder without records of a ladder, and two different records of one trial, are refused in one line."""
    (results / "empty").mkdir()
    assert module.main(["register", str(results / "empty")]) == 2
    assert "no records of suite convergence_long or ladder or ranks" in (line := capsys.readouterr().err)
    write(results / "again" / "ladder", record(trial_of("zero3", 32, 0), 9.0))
    assert module.main(["register", str(results), str(results / "again")]) == 2
    assert "another folder has another record" in (second := capsys.readouterr().err)
    assert line.count("\n") == second.count("\n") == 1
    assert not module.PREDICTIONS.exists()


def test_a_wrong_suite_file_is_named(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistake in the suite file, which says what is still to run, ends the command in one line."""

    def wrong(_: Axis) -> None:
        raise SuiteError("suites/ladder.toml: no such key")

    monkeypatch.setattr(module, "planned", wrong)
    assert module.main(["register", str(results)]) == 2
    assert capsys.readouterr().err == "docs.tables.ladder: suites/ladder.toml: no such key\n"


def test_other_arguments_show_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """A command that does not exist gives status 2 and the commands that do."""
    assert module.main(["register"]) == module.main(["predict", "x"]) == 2
    assert "register FOLDER..." in capsys.readouterr().err


# What is committed


def test_registered_predictions_follow_from_their_points() -> None:
    """Each committed prediction is what the fit of its own points gives, to the digits that are registered."""
    for each in registered_in(PREDICTIONS):
        for prediction in each.predictions:
            found = each.fit(prediction.configuration).predict(prediction.at, prediction.seeds)
            for name in ("line", "constant", "low", "high"):
                assert getattr(prediction, name) == pytest.approx(getattr(found, name), abs=5e-6)


@pytest.mark.long
def test_the_page_is_that_of_the_records(tmp_path: Path) -> None:
    """docs/ladder.md and its figures are what ``python -m docs.tables.ladder`` would write."""
    known = ladders()
    assert PAGE.read_text(encoding="utf-8") == page(known)
    for ladder in known:
        if ladder.rungs:
            draw(ladder, tmp_path / "figure.svg")
            committed = PAGE.parent / "figures" / f"ladder_{ladder.axis.name}.svg"
            assert committed.read_bytes() == (tmp_path / "figure.svg").read_bytes()
