"""Net speed-ups are the product of two known factors, name the source of seconds, and say what was not reached."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import cli
from harness.cluster.interrupts import REFUSED
from harness.errors import Refusal
from harness.measure import machine_file
from harness.records import run_record
from harness.records.confidence_intervals import product_interval
from harness.records.run_record import Node, Run, Software, SuiteText
from harness.records.trial_record import Record, Step, write
from harness.suites.trial import Cluster, Model, PolicyChanges, Trial
from impl.plan.step_time import Machine
from report import seconds_key, stamp
from report.build import build, every_table
from report.data.frames import ReportError, frames_of
from report.data.metrics import Derived, StepSource, derive
from report.draw.figure import FORMS, records_behind
from report.draw.theme import Style
from report.effects import net_speed
from report.effects.net_speed import NetSpeed, net_speeds
from report.effects.step_seconds import StepsFrom, derive_folder, unmatched
from report.figures.learning import NET_SPEED
from report.page import render
from report.tables.latex import tabular
from report.tables.net_speed import net_speedup
from report.verdicts import verdicts
from tests.report.records import changed_steps, ending_at, record_of, taken_by_others
from tests.report.test_hostile_records import failed

NOISE = np.array([0.01, -0.01, 0.005, -0.005, 0.002, -0.002])
SHAPED = Cluster(rate="50 Mbit/s")
FREE = Cluster(link="none")
SECONDS = {"zero3": 2.0, "zeropp": 1.0}


def _taking(seconds: float, _: Step) -> dict[str, Any]:
    return {"total": seconds}


def trained(
    ends: Mapping[str, Sequence[float]],
    cluster: Cluster = SHAPED,
    seconds: Mapping[str, float] = SECONDS,
    **fields: Any,
) -> list[Record]:
    """Trials by strategy and seed whose losses fall from 5 to these, on lines, with steps of known seconds."""
    return [
        changed_steps(
            ending_at(
                Trial(
                    strategy=strategy, seed=seed, steps=120, warmup=0, validate_every=30, cluster=cluster, **fields
                ),
                end,
            ),
            partial(_taking, seconds[strategy] * (1 + NOISE[(seed + len(strategy)) % 6])),
        )
        for strategy, losses in ends.items()
        for seed, end in enumerate(losses)
    ]  # fmt: skip


def timed(cluster: Cluster = SHAPED, seconds: Mapping[str, float] = SECONDS, **fields: Any) -> list[Record]:
    """Short trials by strategy and repeat with steps of known seconds, and no losses."""
    return [
        changed_steps(
            record_of(Trial(strategy=strategy, repeat=repeat, steps=3, warmup=1, cluster=cluster, **fields)),
            partial(_taking, each * (1 + NOISE[(repeat + len(strategy)) % 6])),
        )
        for strategy, each in seconds.items()
        for repeat in range(6)
    ]


WORSE = {"zero3": [2.0] * 6, "zeropp": 2.3 + NOISE}
BETTER = {"zero3": [2.0] * 6, "zeropp": 1.7 + NOISE}
EQUAL = {"zero3": [2.0] * 6, "zeropp": 2.001 + NOISE}


def only(derived: Derived) -> NetSpeed:
    (found,) = net_speeds(derived)
    return found


def verdict_of(derived: Derived, name: str = "ZeRO++") -> tuple[str, str, pd.Series]:
    """Printed cell, its verdict, and the row of the CSV."""
    table = verdicts(derived).table
    rows = {row[0]: row for row in table.rows()}
    raw = pd.read_csv(io.StringIO(table.csv())).set_index("configuration").loc[name]
    place = [column.title for column in table.columns].index("Net speed-up")
    return rows[name][place], str(raw["net_speedup_verdict"]), raw


def test_net_speed_is_the_product_of_both_factors() -> None:
    """A step twice as fast and a loss that takes 3.3 / 3 as many steps of the baseline are a net speed-up of 2.2."""
    found = only(derive(frames_of(trained(BETTER))))
    assert found.step is not None
    assert found.step.speedup.estimate == pytest.approx(2.0, rel=0.01)
    assert found.equal.ratio.estimate == pytest.approx(3.3 / 3)
    assert found.net.estimate == pytest.approx(found.step.speedup.estimate * 3.3 / 3)
    assert found.net == found.at_both == product_interval(found.step.speedup, found.equal.ratio)
    factors = (found.step.speedup, found.equal.ratio)
    below = math.sqrt(sum(math.log(each.estimate / each.low) ** 2 for each in factors))
    assert math.log(found.net.estimate / found.net.low) == pytest.approx(below)
    assert found.net.within_start


def test_a_better_configuration_is_marked_as_better_in_every_form() -> None:
    """In the verdicts' table, its CSV, its Markdown and its LaTeX, with the source of the seconds below."""
    derived = derive(frames_of(trained(BETTER)))
    cell, verdict, raw = verdict_of(derived)
    net = only(derived).net
    assert (cell.split()[0], cell[-1], verdict) == (f"{net.estimate:.2f}", "▲", "better")
    assert (raw["net_speedup"], raw["net_speedup_low"]) == pytest.approx((net.estimate, net.low))
    table = verdicts(derived).table
    assert (
        "The net speed-up compares the times in which a configuration and the baseline reach the baseline's final "
        "loss. The step times of a net speed-up are from this suite's own records." in table.footnotes
    )
    assert "not reached" not in table.footnotes
    assert cell in table.markdown_rows()
    assert "Net" in tabular(table)
    assert verdict_of(derived, "ZeRO-3")[:2] == ("1.00", "baseline")


def test_what_does_not_reach_the_baselines_loss_says_so_with_both_losses() -> None:
    """There is no number for the baseline's loss, but one for the loss that both reach."""
    derived = derive(frames_of(trained(WORSE)))
    cell, verdict, raw = verdict_of(derived)
    found = only(derived)
    assert re.fullmatch(r"not reached: 2\.30 against 2\.00; 1\.\d\d ± 0\.0\d at 2\.30", cell)
    assert f"; {found.at_both.estimate:.2f} ±" in cell
    assert verdict == "not reached"
    assert 'A cell with "not reached" has the final losses of' in verdicts(derived).table.footnotes
    assert math.isnan(raw["net_speedup"])
    assert math.isnan(found.net.estimate)
    assert found.at_both.estimate == pytest.approx(2.0 * 2.7 / 3, rel=0.01)
    (row,) = net_speedup(derived).rows()
    assert "not reached: 2.30 against 2.00" in row
    assert any(cell.startswith(f"{found.at_both.estimate:.2f} (") for cell in row)


def test_a_loss_above_the_baselines_whole_curve_is_not_reached_either() -> None:
    """Although no ratio of steps is known."""
    derived = derive(frames_of(trained({"zero3": [2.0] * 6, "zeropp": 4.5 + NOISE})))
    assert only(derived).equal.why == "a curve begins below that loss"
    assert verdict_of(derived)[:2] == ("not reached: 4.50 against 2.00", "not reached")
    (row,) = net_speedup(derived).rows()
    assert "not reached: 4.50 against 2.00" in row


def test_losses_that_hardly_differ_have_digits_that_tell_them_apart() -> None:
    """And not more."""
    derived = derive(frames_of(trained({"zero3": [2.0] * 6, "zeropp": 2.003 + 0.01 * NOISE})))
    assert net_speed.in_words(only(derived).equal) == "not reached: 2.0030 against 2.0000"


def test_a_loss_that_does_not_differ_significantly_has_a_number_with_its_interval() -> None:
    """Although it ends a little above the baseline's."""
    derived = derive(frames_of(trained(EQUAL)))
    found = only(derived)
    assert found.equal.loss > found.equal.base
    assert found.net.known
    assert found.net.estimate == pytest.approx(2.0 * 2.999 / 3, rel=0.01)
    assert verdict_of(derived)[1] == "better"  # by its steps


def test_one_seed_has_no_interval() -> None:
    """And no verdict."""
    derived = derive(frames_of(trained({"zero3": [2.0], "zeropp": [1.7]})))
    assert not only(derived).net.known
    cell, verdict, _ = verdict_of(derived)
    assert re_number(cell) == pytest.approx(2.0 * 3.3 / 3, rel=0.05)
    assert (cell[-1], verdict) == ("?", "inconclusive")
    higher = derive(frames_of(trained({"zero3": [2.0], "zeropp": [2.3]})))
    assert verdict_of(higher)[1] == "not reached"


def re_number(cell: str) -> float:
    return float(cell.split(maxsplit=1)[0])


def test_unpaired_seeds_have_no_net_speed() -> None:
    """Neither in the table nor in the verdicts."""
    records = [
        *trained({"zero3": [2.0] * 3}),
        *(record for record in trained({"zeropp": [1.7] * 6}) if record.trial["seed"] > 2),
    ]
    derived = derive(frames_of(records))
    assert net_speeds(derived) == ()
    assert "Net speed-up" not in [column.title for column in verdicts(derived).table.columns]


@given(st.floats(1e-3, 1e3))
@settings(max_examples=4, deadline=None)
def test_scaling_all_seconds_changes_no_ratio(scale: float) -> None:
    """Only the ratio of seconds counts."""
    plain, scaled = (
        only(derive(frames_of(trained(BETTER, seconds={name: by * each for name, each in SECONDS.items()}))))
        for by in (1.0, scale)
    )
    for one, other in ((plain.net, scaled.net), (plain.equal.ratio, scaled.equal.ratio)):
        assert (one.estimate, one.low, one.high) == pytest.approx((other.estimate, other.low, other.high))


def test_seconds_of_a_link_without_a_rate_are_no_seconds() -> None:
    """The verdicts then have no column; the table has the ratio of steps and says how to name seconds."""
    derived = derive(frames_of(trained(BETTER, FREE)))
    assert only(derived).step is None
    assert "Net speed-up" not in [column.title for column in verdicts(derived).table.columns]
    table = net_speedup(derived)
    assert "name a suite with --seconds" in table.footnotes
    assert table.data["steps_ratio"].iloc[0].estimate == pytest.approx(1.1)
    assert "Seconds from" not in [column.title for column in table.columns]


def source(records: list[Record], name: str = "quickstart") -> StepSource:
    return StepSource(name, derive(frames_of(records)))


def test_seconds_come_from_another_suites_records_of_the_same_work() -> None:
    """Whatever its link, seeds and length; the source is named in the table and below the verdicts."""
    elsewhere = source(timed(Cluster(rate="200 Mbit/s"), {"zero3": 3.0, "zeropp": 1.0}))
    derived = Derived(frames_of(trained(BETTER, FREE)), (elsewhere,))
    found = only(derived)
    assert found.step is not None
    assert found.step.speedup.estimate == pytest.approx(3.0, rel=0.01)
    assert (found.step.seconds, found.step.base_seconds) == pytest.approx((1.0, 3.0), rel=0.01)
    assert found.step.source == "records of quickstart"
    assert "200 Mbit/s" in found.step.where
    assert (
        "records of quickstart (2x2 ranks, 200 Mbit/s, 512 tokens/rank)" in verdicts(derived).table.footnotes
    )
    assert net_speedup(derived).data["_source"].tolist() == [found.step.named]


def test_pairs_of_another_suite_that_were_left_out_are_counted_with_all_its_pairs() -> None:
    """With 12 pairs of seconds, one of them disturbed, and 6 seeds, 1 of 12 pairs was left out."""
    shared = Cluster(rate="200 Mbit/s")
    records = [
        record.model_copy(update={"id": trial.id, "trial": trial.canonical()})
        for record in timed(shared)
        for trial in (
            Trial.from_canonical(record.trial),
            Trial.from_canonical(record.trial | {"repeat": record.trial["repeat"] + 6}),
        )
    ]
    records[0] = taken_by_others(records[0], 0.3)
    derived = Derived(frames_of(trained(BETTER, FREE)), (source(records),))
    assert only(derived).net.n == 6
    footnotes = verdicts(derived).table.footnotes
    assert "In this table, 1 of the 12 pairs of 1 row is left out." in footnotes


def test_a_net_speed_up_to_the_higher_loss_from_disturbed_seconds_alone_is_marked() -> None:
    """As every other number from disturbed trials alone."""
    derived = derive(frames_of([taken_by_others(record, 0.3) for record in trained(WORSE)]))
    assert re.fullmatch(
        r"not reached: 2\.30 against 2\.00; 1\.\d\d ± 0\.0\d ‡ at 2\.30", verdict_of(derived)[0]
    )


@pytest.mark.parametrize("others", ["contrast", ""])
def test_without_the_baseline_that_the_suite_names_nothing_is_compared(others: str) -> None:
    """Another configuration does not take its place: there is no target, and the page's sentence says why.

    In a suite that names no baseline and has no ZeRO-3, it is the configuration listed first.
    """
    ends = {"zeropp": 2.3 + NOISE, "qwz": 2.2 + NOISE}
    records = [
        record.model_copy(update={"role": others, "order": number})
        for number, record in enumerate(trained(ends, seconds={"zeropp": 1.0, "qwz": 1.5}))
    ]
    derived = derive(frames_of(records))
    head = verdicts(derived)
    if others:
        assert head.sentence == (
            "Nothing is compared: 12 trials finished, but none of the baseline that the suite names."
        )
        assert net_speeds(derived) == ()
        assert "none of the baseline" in render(derived, [], every_table(derived))
    else:
        assert only(derived).row["base"] == "ZeRO++"


def test_named_seconds_come_first_and_each_source_has_its_row() -> None:
    """The verdicts' column shows the first source, the table the suite's own too."""
    elsewhere = source(timed(Cluster(rate="200 Mbit/s"), {"zero3": 3.0, "zeropp": 1.0}))
    derived = Derived(frames_of(trained(BETTER)), (elsewhere,))
    steps = [each.step for each in net_speeds(derived)]
    assert [each.source for each in steps if each] == ["records of quickstart", "this suite's own records"]
    assert re_number(verdict_of(derived)[0]) == pytest.approx(3.3, rel=0.01)


def test_several_settings_of_a_source_are_listed_and_none_is_chosen() -> None:
    """Two rates have two rows, and the verdicts leave the column out."""
    rates = [
        timed(Cluster(rate=f"{rate} Mbit/s"), {"zero3": at, "zeropp": 1.0})
        for rate, at in ((25, 4.0), (200, 1.5))
    ]
    derived = Derived(frames_of(trained(BETTER, FREE)), (source([*rates[0], *rates[1]]),))
    speeds = [each.step.speedup.estimate for each in net_speeds(derived) if each.step]
    assert speeds == pytest.approx([4.0, 1.5], rel=0.01)
    assert "Net speed-up" not in [column.title for column in verdicts(derived).table.columns]


OTHER_WORK: dict[str, tuple[Callable[[], list[Record]], str]] = {
    "model": (
        lambda: timed(model=Model(name="gpt-tiny")),
        "trains other work: model.name gpt-tiny instead of gpt-small",
    ),
    "batch": (
        lambda: timed(tokens_per_rank=256),
        "trains other work: tokens_per_rank 256 instead of 512",
    ),
    "policy": (
        lambda: timed(policy=PolicyChanges(prefetch=0)),
        "has no configuration of this suite on a link with a rate",
    ),
    "link": (
        lambda: timed(FREE),
        "has no configuration of this suite on a link with a rate",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("records", "why"), OTHER_WORK.values(), ids=OTHER_WORK)
def test_seconds_of_other_work_are_not_taken(records: Callable[[], list[Record]], why: str) -> None:
    """What differs is named in the table."""
    elsewhere = source(records(), "other")
    derived = Derived(frames_of(trained(BETTER, FREE)), (elsewhere,))
    assert unmatched(derived, elsewhere) == why
    assert only(derived).step is None
    assert f"Seconds from other: {why}." in net_speedup(derived).footnotes


def test_a_suite_without_training_can_use_no_seconds() -> None:
    """The reason names the suite itself, and not the source of the seconds."""
    elsewhere = source(timed(), "other")
    derived = Derived(frames_of(failed("zero3", "zeropp")), (elsewhere,))
    assert unmatched(derived, elsewhere) == "cannot be used: no trial of this suite trained"


MODEL: dict[str, Any] = {
    "name": "cluster", "source": "a test", "fixed": 0.0, "per_token": 1e-10, "efficiency": 1.0, "fewest": 1,
    "most": 4096, "overlap": "schedule", "nature": "data sheet",
}  # fmt: skip


def test_a_model_of_a_machine_predicts_both_steps_on_the_rate_that_is_named() -> None:
    """Slower links favour ZeRO++; without a spread, the interval is that of the losses alone."""
    speeds = {}
    for rate in (10.0, 1e5):
        derived = Derived(
            frames_of(trained(BETTER, FREE)), (StepSource("cluster", machine=Machine(**MODEL), rate=rate),)
        )
        found = only(derived)
        assert found.step is not None
        assert found.step.source == "model cluster, data sheet"
        speed = found.step.speedup
        assert speed.low == speed.estimate == speed.high
        assert math.log(found.net.high / found.net.estimate) == pytest.approx(
            math.log(found.equal.ratio.high / found.equal.ratio.estimate)
        )
        speeds[rate] = speed.estimate
    assert speeds[10.0] > 2.0 > speeds[1e5]


def test_a_models_spread_widens_the_interval() -> None:
    """By two standard deviations of both steps' errors."""
    spread = Machine(**MODEL, spread=0.1)
    derived = Derived(frames_of(trained(BETTER, FREE)), (StepSource("cluster", machine=spread, rate=10.0),))
    step = only(derived).step
    assert step is not None
    assert math.log(step.speedup.high / step.speedup.estimate) == pytest.approx(2 * math.hypot(0.1, 0.1))


def test_trials_of_few_steps_have_no_net_speed() -> None:
    """Their losses hardly depend on the policy."""
    records = [
        ending_at(Trial(strategy=name, seed=seed, steps=80, warmup=0, validate_every=20, cluster=SHAPED), 2.0)
        for name in ("zero3", "zeropp")
        for seed in range(6)
    ]
    assert net_speeds(derive(frames_of(records))) == ()


def test_the_figure_has_seconds_of_each_source_and_bytes(tmp_path: Path) -> None:
    """Seconds are steps times the seconds of a step; the caption has two sentences, and all forms are drawn."""
    elsewhere = source(timed(Cluster(rate="200 Mbit/s"), {"zero3": 3.0, "zeropp": 1.0}))
    derived = Derived(frames_of(trained(BETTER, FREE)), (elsewhere,))
    data = NET_SPEED.table(derived)
    panels = list(data["panel"].unique())
    assert panels[0] == "seconds in steps\nrecords of quickstart, 2x2 ranks, 200 Mbit/s, 512 tokens/rank"
    assert panels[1].endswith(" sent between nodes")
    last = (
        data[data["panel"].eq(panels[0]) & data["step"].eq(120)].groupby("configuration")["against"].median()
    )
    assert last.to_dict() == pytest.approx({"ZeRO-3": 360.0, "ZeRO++": 120.0}, rel=0.01)
    assert set(records_behind(data)) == set(derived.frames.trial_of)
    for text in (NET_SPEED.caption(data), NET_SPEED.alt):
        assert 1 <= text.count(". ") + text.endswith(".") + text.endswith("?") <= 2
    drawn = NET_SPEED.draw(derived, tmp_path, Style(), FORMS)
    assert drawn is not None
    assert {path.suffix for path in tmp_path.iterdir()} == {".svg", ".pdf", ".png", ".csv"}
    assert NET_SPEED.table(derive(frames_of(trained(BETTER, FREE)))).empty


def folder_of(path: Path, records: list[Record], text: str = "") -> Path:
    """A results folder; ``text`` is the suite file of the run that wrote the records."""
    run = None
    if text:
        path.mkdir(parents=True)
        node = Node(machine={}, code={}, software=Software(packages=[], libraries={}), environment={})
        run = run_record.write(
            path, Run(suite=SuiteText(name="mine.toml", text=text), changes=None, nodes=[node])
        )
    for record in records:
        write(path, record.model_copy(update={"run": run, "digest": None}))
    return path


def test_the_suites_key_names_the_folder_beside_it(tmp_path: Path) -> None:
    """Without records there, the table says so; with them they are read, and a change of them makes the page stale."""
    mine = folder_of(tmp_path / "mine", trained(BETTER, FREE), 'seconds = "other"\n')
    before = stamp.digest(mine)
    missing = derive_folder(mine)
    assert only(missing).step is None
    assert (
        "Seconds from other: there are no records of it beside this suite's; run other"
        in net_speedup(missing).footnotes
    )
    other = folder_of(tmp_path / "other", timed())
    found = only(derive_folder(mine))
    assert found.step is not None
    assert found.step.source == "records of other"
    after = stamp.digest(mine)
    assert after != before
    next(other.glob("*.json")).unlink()
    assert stamp.digest(mine) != after


@pytest.mark.parametrize(
    "text", ['seconds = "../other"\n', "seconds = 3\n", "seconds = [\n", "name = 'mine'\n"]
)
def test_a_suite_text_that_names_no_suite_names_no_folder(tmp_path: Path, text: str) -> None:
    """Records may come from strangers: paths and other types are not followed."""
    folder_of(tmp_path / "other", timed())
    mine = folder_of(tmp_path / "mine", trained(BETTER, FREE), text)
    assert seconds_key.files(mine) == []
    assert only(derive_folder(mine)).step is None


def test_a_folder_that_is_named_on_the_command_line_must_fit(tmp_path: Path) -> None:
    """One line names what differs; a machine needs a file that can be read."""
    mine = folder_of(tmp_path / "mine", trained(BETTER, FREE))
    other = folder_of(tmp_path / "other", timed(model=Model(name="gpt-tiny")))
    with pytest.raises(
        ReportError, match=r"^--seconds other: trains other work: model.name gpt-tiny instead of gpt-small; "
    ):
        derive_folder(mine, StepsFrom((other,)))
    with pytest.raises(Refusal, match="cannot be read"):
        derive_folder(mine, StepsFrom(machine=tmp_path / "none.toml"))
    machine_file.write(tmp_path / "cluster.toml", Machine(**MODEL))
    derived = derive_folder(mine, StepsFrom((), tmp_path / "cluster.toml", 10.0))
    assert [each.step.source for each in net_speeds(derived) if each.step] == ["model cluster, data sheet"]


def test_an_interval_of_a_machine_reaches_over_all_its_fits(tmp_path: Path) -> None:
    """A machine with alternatives gives the best fit's speed-up, and an interval over the speed-ups of all fits."""
    mine = folder_of(tmp_path / "mine", trained(BETTER, FREE))
    found = []
    for number, changes in enumerate(({}, {"per_token": 10 * MODEL["per_token"] + 1e-9})):
        path = tmp_path / f"{number}.toml"
        machine_file.write(path, Machine(**MODEL | {"alternatives": (changes,) if changes else ()}))
        (one,) = (
            each.step for each in net_speeds(derive_folder(mine, StepsFrom((), path, 10.0))) if each.step
        )
        found.append(one.speedup)
    alone, several = found
    assert several.estimate == alone.estimate
    assert several.low < alone.low or several.high > alone.high
    assert several.low <= several.estimate <= several.high


@pytest.mark.usefixtures("undrawn")
def test_a_page_with_seconds_from_elsewhere_is_not_the_usual_one(tmp_path: Path) -> None:
    """`zeropp run` draws its own again; tables hold the number as CSV, Markdown and LaTeX."""
    mine = folder_of(tmp_path / "mine", trained(BETTER, FREE))
    other = folder_of(tmp_path / "other", timed())
    build(mine)
    assert stamp.sentences_of(mine) is not None
    build(mine, steps=StepsFrom((other,)))
    assert stamp.sentences_of(mine) is None
    raw = pd.read_csv(mine / "tables" / "net_speedup.csv").iloc[0]
    assert raw["net_speedup"] == pytest.approx(raw["step_speedup"] * raw["steps_ratio"])
    for form in ("md", "tex"):
        assert "records of other" in (mine / "tables" / f"net_speedup.{form}").read_text(encoding="utf-8")
        assert "Net" in (mine / "tables" / f"verdicts.{form}").read_text(encoding="utf-8")
    assert "net_speed" in (mine / "report.html").read_text(encoding="utf-8")


@pytest.mark.usefixtures("undrawn")
def test_the_command_line_names_seconds_and_refuses_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A suite by its name, or a machine with a rate; other work, and a rate alone, have status 2."""
    mine = folder_of(tmp_path / "mine", trained(BETTER, FREE))
    folder_of(tmp_path / "other", timed())
    folder_of(tmp_path / "tiny", timed(model=Model(name="gpt-tiny")))
    machine_file.write(tmp_path / "cluster.toml", Machine(**MODEL))
    asked = ["report", "mine", "--results", str(tmp_path)]
    with_machine = ["--machine", str(tmp_path / "cluster.toml"), "--rate", "10 Mbit/s"]
    assert cli.main([*asked, "--seconds", "other", *with_machine]) == cli.OK
    sources = pd.read_csv(mine / "tables" / "net_speedup.csv")["source"]
    assert list(sources) == ["records of other", "model cluster, data sheet"]
    capsys.readouterr()
    for options, message in (
        (
            ["--seconds", "tiny"],
            "zeropp: --seconds tiny: trains other work: model.name gpt-tiny instead of gpt-small; ",
        ),
        (["--seconds", "nope"], "zeropp: unknown suite 'nope': "),
        (["--rate", "10 Mbit/s"], "zeropp: --rate sets the link of a machine: add --machine MACHINE.toml, "),
        ([*with_machine[:2], "--rate", "fast"], "zeropp: --rate fast: expected "),
    ):
        assert cli.main([*asked, *options]) == REFUSED
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(message)
