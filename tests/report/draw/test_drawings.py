"""What single figures show, read from their axes."""

from __future__ import annotations

import math
import re
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

from harness.records.record import Record
from harness.suites.trial import Cluster, PolicyChanges, Trial
from report.data import metrics
from report.data import text as wording
from report.data.frames import frames_of
from report.data.metrics import Derived, derive
from report.draw import theme
from report.draw.figure_definition import Plot, peers_note
from report.figures import registry
from report.tables import registry as tables
from tests.report.records import busy_while_waiting, changed_steps, record_of, records_of, trials_of

PLOTS = {plot.name: plot for plot in registry.PLOTS}


def _drawn(name: str, derived: Derived) -> tuple[Figure, pd.DataFrame, Plot]:
    plot = PLOTS[name]
    data = plot.data(derived)
    with theme.style():
        figure = plot.draw(data)
    assert figure is not None
    return figure, data, plot


def _at_rates(losses: dict[str, float]) -> list[Record]:
    """ZeRO-3 and ZeRO++ at each rate, all of whose validations have the rate's loss."""

    def lost(loss: float) -> Any:
        def change(fields: dict[str, Any]) -> None:
            fields["validations"] = [v.model_copy(update={"loss": loss}) for v in fields["validations"]]

        return change

    return [
        record_of(
            Trial(strategy=strategy, cluster=Cluster(rate=rate), validate_every=0, steps=100, warmup=1),
            change=lost(loss),
        )
        for rate, loss in losses.items()
        for strategy in ("zero3", "zeropp")
    ]


def test_a_loss_that_no_rate_changes_is_drawn_once() -> None:
    """Equal at 12.5, 50 Mbit/s and unshaped, the final loss has one row a contender, and says so."""
    figure, data, plot = _drawn(
        "final_loss", derive(frames_of(_at_rates({"12.5 Mbit/s": 3.5, "50 Mbit/s": 3.5, "unshaped": 3.5})))
    )
    assert [tick.get_text() for tick in figure.axes[0].get_yticklabels()] == ["ZeRO-3", "ZeRO++"]
    assert "at each of 3 rates" in plot.caption(data)
    assert len(data) == 6


def test_a_loss_that_a_rate_changes_is_drawn_per_rate() -> None:
    """Where one rate's loss differs, every rate keeps its row."""
    figure, data, plot = _drawn(
        "final_loss", derive(frames_of(_at_rates({"12.5 Mbit/s": 3.5, "50 Mbit/s": 3.6})))
    )
    assert len(figure.axes[0].get_yticklabels()) == 4
    assert "at each of" not in plot.caption(data)


def test_the_final_loss_says_after_how_many_steps() -> None:
    """Axis, caption and words count the steps before the last validation, warm-ups included."""
    figure, data, plot = _drawn("final_loss", derive(frames_of(_at_rates({"50 Mbit/s": 3.5}))))
    assert "after 101 steps" in figure.axes[0].get_xlabel()
    assert "after 101 steps" in plot.caption(data)
    assert "after 101 steps" in plot.alt(data)
    assert "after 101 steps" in tables.summary(derive(frames_of(_at_rates({"50 Mbit/s": 3.5})))).caption


def _achieving(trial: Trial, mbit: float) -> Record:
    def change(fields: dict[str, Any]) -> None:
        fields["link"] = fields["link"].model_copy(update={"probed_mbit": [mbit]})

    return record_of(trial, change=change)


@pytest.mark.parametrize(("rate", "marked"), [("50 Mbit/s", True), ("unshaped", False)])
def test_an_unshaped_cell_is_not_marked(rate: str, marked: bool) -> None:
    """Links whose rates differ by 25 % mark a shaped cell, and no unshaped one."""
    cluster = Cluster(rate=rate)
    pair = [
        _achieving(Trial(strategy=name, cluster=cluster), mbit)
        for name, mbit in (("zero3", 40.0), ("zeropp", 50.0))
    ]
    assert bool(derive(frames_of(pair)).differing) is marked


@given(st.floats(min_value=1, max_value=1e15, allow_nan=False))
def test_a_byte_unit_leaves_at_most_three_digits_before_the_point(largest: float) -> None:
    """From one byte to 1000 TB, the value in its unit lies from 1 to 1000."""
    size, _ = wording.byte_unit(largest)
    assert 1 <= largest / size <= 1000


def test_small_traffic_is_drawn_in_megabytes() -> None:
    """The loss figure's axis of bytes has the unit in which its ticks are short."""
    figure, data, _ = _drawn("loss", derive(frames_of(records_of("convergence", repeats=1))))
    _, unit = wording.byte_unit(data["inter_bytes"].max())
    assert figure.axes[2].get_xlabel() == f"{unit} sent between nodes"
    assert figure.axes[2].get_xlim()[1] < 1100


@pytest.mark.parametrize(("count", "told"), [(0, "0 seeds"), (1, "1 seed"), (2, "2 seeds"), (3, "3 seeds")])
def test_one_is_singular(count: int, told: str) -> None:
    """One seed, and any other number of seeds."""
    assert wording.counted(count, "seed") == told


def test_no_caption_leaves_the_plural_open() -> None:
    """No caption, alternative text or table of any suite says ``(s)``."""
    for suite in ("quickstart", "convergence", "bits"):
        derived = derive(frames_of(records_of(suite, repeats=1)))
        told = [table.caption for table in tables.all_tables(derived)]
        for plot in registry.PLOTS:
            if len(data := plot.data(derived)):
                told += [plot.caption(data), plot.alt(data)]
        assert not [text for text in told if "(s)" in text]


def test_calibrations_stand_apart_from_probes() -> None:
    """No calibration is drawn where a probe is, at one rate and at several."""
    several = records_of("bandwidth", repeats=1)
    one = [record_of(trial, order=order) for order, trial in enumerate(trials_of("quickstart", repeats=1))]
    for records in (one, several):
        figure, _, _ = _drawn("link", derive(frames_of(records)))
        lines = {line.get_label(): line for line in figure.axes[0].lines}
        calibrated, probed = (np.asarray(lines[name].get_xdata()) for name in ("calibrated", "probed"))
        assert len(calibrated)
        assert not set(calibrated) & set(probed)
        assert lines["calibrated"].get_color() != lines["probed"].get_color()


def test_pairs_are_told_beside_their_interval() -> None:
    """The summary has the number of pairs and their range; the figures' captions name Student's t."""
    derived = derive(frames_of(records_of("ablation", repeats=6)))
    found = tables.summary(derived)
    row = found.data.set_index("contender").loc["ZeRO++"]
    ours = derived.pairs[derived.pairs["strategy"] == "zeropp"]["speedup"]
    assert row["pairs"] == 6
    assert row["pairs_told"] == f"6: {ours.min():.2f} to {ours.max():.2f}"
    lines = PLOTS["speedup"]
    over_rates = lines.data(derive(frames_of(records_of("bandwidth", repeats=2))))
    assert "intervals are in the Summary table" in lines.caption(over_rates)
    for name in ("speedup", "ablation"):
        figure, data, plot = _drawn(name, derived)
        assert "Student's t from 6 pairs" in plot.caption(data)
        shown = [float(x) for line in figure.axes[0].lines for x in np.asarray(line.get_xdata())]
        assert set(ours) <= set(shown)


@pytest.mark.parametrize(("name", "suite"), [("speedup", "quickstart"), ("ablation", "ablation")])
def test_intervals_of_scattered_pairs_are_drawn_whole(name: str, suite: str) -> None:
    """Both ends lie inside the panel, however wide the interval, and labels stand beyond it."""

    def scattered(record: Record) -> Record:
        stretch = float(np.random.default_rng(int(record.id, 16)).lognormal(0, 1.0))
        return changed_steps(record, lambda step: {"total": step.total * stretch})

    derived = derive(frames_of([scattered(record) for record in records_of(suite, repeats=6)]))
    figure, data, _ = _drawn(name, derived)
    left, right = figure.axes[0].get_xlim()
    ends = [metrics.speedup(group) for _, group in data.groupby("contender") if len(group) == 6]
    assert max(found.high for found in ends) > 3 * data["speedup"].median()
    assert all(left <= found.low and found.high <= right for found in ends)


def test_parity_draws_its_interval_whole() -> None:
    """Of six pairs, with the ends inside the panel."""
    derived = derive(frames_of(records_of("bandwidth", repeats=6)))
    figure, data, plot = _drawn("parity", derived)
    left, right = figure.axes[0].get_xlim()
    for _, group in data.groupby(["tokens_per_rank", "full_rate"]):
        found = metrics.parity_interval(group)
        assert left <= found.low <= found.estimate <= found.high <= right
    assert "95 % interval" in plot.caption(data)


def test_captions_say_that_intervals_are_of_sweeps() -> None:
    """Of three sweeps they name their number; of two that there is no interval."""
    for sweeps, words in (
        (3, "Of 3 sweeps: intervals are of the sweeps' means"),
        (2, "none of fewer than 3"),
    ):
        records = [
            record.model_copy(update={"sweep": record.trial["repeat"] // 2})
            for record in records_of("quickstart", repeats=2 * sweeps)
        ]
        derived = derive(frames_of(records))
        plot = PLOTS["speedup"]
        assert words in plot.caption(plot.data(derived))
        assert words in tables.summary(derived).caption
        row = tables.summary(derived).data.set_index("contender").loc["ZeRO++"]
        assert row["pairs_told"].startswith(f"{2 * sweeps} in {sweeps} sweeps: ")
        assert math.isnan(row["speedup_low"]) == (sweeps < 3)


def test_one_pair_has_no_interval() -> None:
    """Of a single pair the captions say that there is none, and name no law of one."""
    for name, suite in (("speedup", "quickstart"), ("ablation", "ablation")):
        data = PLOTS[name].data(derive(frames_of(records_of(suite, repeats=1))))
        assert "of one pair, so without an interval" in PLOTS[name].caption(data)
        assert "Student" not in PLOTS[name].caption(data)


def test_contenders_without_a_published_rule_are_named_with_the_reason() -> None:
    """Changed blocks or bits, and strategies that the blog does not count, have no cross: the caption and the
    table say which these are and why, and say nothing where all have one.
    """
    policy = PolicyChanges(weights="int8:64", gradients="int4:64", align=64)
    trials = [Trial(strategy=name) for name in ("zero3", "zeropp", "fsdp2")]
    derived = derive(
        frames_of([record_of(trial) for trial in (*trials, Trial(strategy="zeropp", policy=policy))])
    )
    figure, data, plot = _drawn("volume", derived)
    (crosses,) = [line for line in figure.axes[0].get_lines() if line.get_label() == "published rule"]
    assert np.isnan(np.asarray(crosses.get_xdata(), dtype=float)).tolist() == [True, False, False, True]
    for caption in (plot.caption(data), tables.volume(derived).caption):
        assert "It has no number for ZeRO++ (w int8:64, g int4:64): it counts the presets" in caption
        assert "Nor for FSDP2: it is of ZeRO-3 and of ZeRO++'s techniques alone." in caption
    assert "the interfaces' where there is no ledger" in plot.caption(data)
    derived = derive(frames_of(records_of("quickstart", repeats=1)))
    _, data, plot = _drawn("volume", derived)
    for caption in (plot.caption(data), tables.volume(derived).caption):
        assert "has no number for" not in caption
    assert "where there is no ledger" not in plot.caption(data)


def test_captions_name_those_of_whom_a_part_is_not_drawn() -> None:
    """Peers have no exposed communication, and like policies of 32 bits no split of what is spared; where
    everybody has both, the captions say nothing of it.
    """
    derived = {
        names: derive(frames_of([record_of(Trial(strategy=name)) for name in names]))
        for names in (("ddp", "exact", "zero3"), ("zero3", "zeropp"))
    }
    for names, some in ((("ddp", "exact", "zero3"), True), (("zero3", "zeropp"), False)):
        _, data, plot = _drawn("step_split", derived[names])
        told = "For DDP it is not known: it is part of forward and backward."
        assert (told in plot.caption(data)) is some
        assert ("it is not known" in plot.caption(data)) is some
        _, data, plot = _drawn("volume", derived[names])
        told = (
            "then by quantising (of our engine's policies of at most 16 bits: not of DDP and exact (fp32))."
        )
        assert (told in plot.caption(data)) is some
        assert ("then by quantising. " in plot.caption(data)) is not some


def test_the_size_of_m_is_told_of_every_place() -> None:
    """M is that of one gather, of each number of nodes and whatever the micro-batches of a step."""
    trials = [
        Trial(strategy="zero3", cluster=Cluster(nodes=nodes), accumulation=accumulation)
        for nodes, accumulation in ((2, 1), (2, 2), (4, 1))
    ]
    derived = derive(frames_of([record_of(trial) for trial in trials]))
    _, data, plot = _drawn("volume", derived)
    numel = derived.trials.drop_duplicates("nodes").set_index("nodes")["numel"]
    two, four = (f"{2 * numel[nodes] * (nodes - 1) / 1e6:.2f} MB" for nodes in (2, 4))
    assert two != four
    for told in (f"gpt-small: {two}", f"gpt-small, 2 micro-batches: {two}", f"gpt-small: {four}"):
        assert told in plot.caption(data)
    assert "Of several micro-batches: the mean of one." in plot.caption(data)


def test_many_contenders_without_a_published_rule_are_counted() -> None:
    """Many codecs are not listed one by one."""
    _, data, plot = _drawn("volume", derive(frames_of(records_of("bits", repeats=1))))
    told = re.search(r"It has no number for the (\d+) contenders with changes", plot.caption(data))
    assert told is not None
    assert int(told[1]) == data[data["contender"].str.contains(r"\(")]["contender"].nunique()


def test_trials_are_counted_from_one() -> None:
    """The axis of the link's rates has whole trials from 1 on, and the caption places calibrations."""
    figure, data, plot = _drawn("link", derive(frames_of(records_of("ablation", repeats=1)[:3])))
    assert list(figure.axes[0].get_xticks()) == [1, 2, 3]
    (probed,) = [line for line in figure.axes[0].get_lines() if line.get_label() == "probed"]
    assert list(np.asarray(probed.get_xdata(), dtype=float)) == [1, 2, 3]
    assert "a calibration stands before the first trial that it served" in plot.caption(data)


def test_a_mark_that_is_not_drawn_is_not_explained() -> None:
    """Over rates, shares above 1 are lines without marks: the caption gives the reason without one."""
    data = PLOTS["speedup"].data(derive(frames_of(records_of("bandwidth", repeats=1))))
    assert "Where the share is above 1, what is said" in PLOTS["speedup"].caption(data)
    assert "§" not in PLOTS["speedup"].caption(data)


def test_captions_say_how_peers_travel() -> None:
    """Where DDP or FSDP2 stand beside policies, captions say that they send fp32, and what gloo does."""
    derived = derive(frames_of(records_of("bandwidth", repeats=1)))
    for name in ("throughput", "speedup", "volume", "step_split"):
        caption = PLOTS[name].caption(PLOTS[name].data(derived))
        assert "FSDP2 travels in fp32; on gloo, FSDP2's reduce-scatter sends the bytes of" in caption
    assert peers_note(pd.DataFrame({"strategy": ["ddp", "zero3"]})) == "DDP travels in fp32. "
    assert peers_note(pd.DataFrame({"strategy": ["zero3", "single"]})) == ""
    several = pd.DataFrame(
        {
            "strategy": ["ddp", "ddp-bf16", "deepspeed", "deepspeed"],
            "contender": ["DDP", "DDP, bf16 hook", "DeepSpeed", "DeepSpeed (compute bf16)"],
        }
    )
    told = peers_note(several)
    assert "DDP and DeepSpeed travel in fp32; DDP, bf16 hook and DeepSpeed travel in bf16. " in told


def _holding(trial: Trial, extra: dict[str, int]) -> Record:
    def change(fields: dict[str, Any]) -> None:
        fields["ranks"] = [
            rank.model_copy(
                update={"memory": rank.memory.model_copy(update={"engine": rank.memory.engine | extra})}
            )
            for rank in fields["ranks"]
        ]

    return record_of(trial, change=change)


def test_a_part_without_a_formula_is_hatched_and_left_out_of_the_total() -> None:
    """A measured part that no formula has is hatched; the tick stands where the other parts end."""
    extra = 2 * 2**20
    trials = [Trial(strategy=name) for name in ("zero3", "zeropp")]
    records = [_holding(trials[0], {}), _holding(trials[1], {"wire": extra})]
    derived = derive(frames_of(records))
    figure, _, plot = _drawn("memory", derived)
    ax = figure.axes[0]
    bars = [patch for patch in ax.patches if isinstance(patch, Rectangle) and patch.get_width() > 0]
    hatched = [bar for bar in bars if bar.get_hatch()]
    assert [bar.get_width() for bar in hatched] == [pytest.approx(2)]
    (ticks,) = (line for line in ax.lines if line.get_label() == "formula")
    solid = sum(bar.get_width() for bar in bars if not bar.get_hatch() and round(bar.get_y() + 0.31) == 1)
    assert np.asarray(ticks.get_xdata())[1] == pytest.approx(solid)
    assert any(text.get_text().endswith(" + 2.000") for text in ax.texts)
    assert "hatched" in plot.caption(plot.data(derived))
    row = tables.memory(derived).data.set_index("contender").loc["ZeRO++"]
    assert row["covered_mib"] == pytest.approx(row["formula_mib"])
    assert row["beyond_mib"] == pytest.approx(2)


def test_contenders_without_any_formula_leave_the_legend_plain() -> None:
    """Beside policies, peers' parts are hatched, the legend's colours are not, and it names the hatch."""
    derived = derive(
        frames_of([_holding(Trial(strategy=name), {"masters": 2**20}) for name in ("ddp", "zero3", "zeropp")])
    )
    figure, _, _ = _drawn("memory", derived)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    hatched = [
        label
        for handle, label in zip(handles, labels, strict=True)
        if any(patch.get_hatch() for patch in getattr(handle, "patches", []))
    ]
    assert hatched == ["no formula"]


def _uneven(record: Record) -> Record:
    """Of two repeats the second takes three times as long, of ZeRO++ five times."""
    if not record.trial["repeat"]:
        return record
    longer = 5 if record.trial["strategy"] == "zeropp" else 3
    return changed_steps(record, lambda step: {"total": longer * step.total})


def test_markers_and_rows_give_one_speed() -> None:
    """Of two repeats too markers are the Summary's speed-ups, and tokens/s are those of its step."""
    records = [_uneven(record) for record in records_of("bandwidth", repeats=2)]
    derived = derive(frames_of(records))
    rows = tables.summary(derived).data
    cells = derived.trials.drop_duplicates("where").set_index("where")
    tokens = rows["where"].map(cells["tokens_per_rank"] * cells["nodes"] * cells["ranks_per_node"])
    assert np.allclose(rows["tokens_per_second"] * rows["step_seconds"], tokens)
    figure, _, _ = _drawn("speedup", derived)
    marked = [
        float(y)
        for ax in figure.axes
        for line in ax.lines
        if line.get_marker() not in {"None", ".", "_"}
        for y in np.atleast_1d(line.get_ydata())
    ]
    ours = rows[rows["contender"] == "ZeRO++"]["speedup"]
    assert len(ours) > 3
    assert all(any(math.isclose(value, y, rel_tol=1e-9) for y in marked) for value in ours)


def test_equal_parts_have_no_hatch() -> None:
    """Where every measured part has its formula, nothing is hatched, no column is added, no caption tells."""
    derived = derive(frames_of([record_of(Trial(strategy=name)) for name in ("zero3", "zeropp")]))
    figure, data, plot = _drawn("memory", derived)
    assert not [patch for patch in figure.axes[0].patches if patch.get_hatch()]
    assert "Without formula" not in [column.title for column in tables.memory(derived).columns]
    assert "without" not in tables.memory(derived).caption
    assert "hatched" not in plot.caption(data)


def test_what_nobody_holds_is_not_in_the_legend() -> None:
    """Parts of memory that are zero for all contenders have no entry, and those shown differ in colour."""
    derived = derive(frames_of([record_of(Trial(strategy=name)) for name in ("zero3", "zeropp")]))
    figure, _, _ = _drawn("memory", derived)
    labels = figure.axes[0].get_legend_handles_labels()[1]
    assert {"masters", "secondary"} <= set(labels)
    assert not {"frozen", "feedback"} & set(labels)
    assert len(set(theme.MEMORY.values())) == len(theme.MEMORY)


def test_the_share_of_the_schedule_is_marked_on_the_whole_ones_bar() -> None:
    """Each bar is as long as the share with processors, and its stroke stands at the one without them."""
    figure, data, plot = _drawn(
        "speedup", derive(frames_of([busy_while_waiting(r) for r in records_of("quickstart")]))
    )
    right = figure.axes[1]
    shares = data.groupby("contender", sort=False)[["share", "schedule_share"]].median()
    assert (shares["share"] > shares["schedule_share"]).all()
    bars = [bar.get_width() for bar in right.patches if isinstance(bar, Rectangle)]
    strokes = [float(np.asarray(line.get_xdata())[0]) for line in right.lines if line.get_marker() == "|"]
    assert sorted(bars) == pytest.approx(sorted(shares["share"]))
    assert sorted(strokes) == pytest.approx(sorted(shares["schedule_share"]))
    assert "processor seconds of all ranks" in plot.caption(data)


@pytest.mark.parametrize("suite", ["quickstart", "bandwidth"])
def test_without_processor_seconds_the_speedup_says_nothing_of_processors(suite: str) -> None:
    """Of older records, neither axes nor caption promise a second share."""
    records = [
        changed_steps(record, lambda _: {"cpu_seconds": None}) for record in records_of(suite, repeats=2)
    ]
    figure, data, plot = _drawn("speedup", derive(frames_of(records)))
    said = [label for ax in figure.axes for label in (ax.get_xlabel(), ax.get_ylabel())]
    assert any("share of what is allowed" in label for label in said)
    assert not any("schedule" in label for label in said)
    assert "processor" not in plot.caption(data)


def test_over_rates_each_marker_has_its_share_of_the_schedule() -> None:
    """In panels over rates, a dash stands for every contender and rate at its share without processors."""
    figure, data, _ = _drawn(
        "speedup", derive(frames_of([busy_while_waiting(r) for r in records_of("bandwidth")]))
    )
    dashes = [line for ax in figure.axes for line in ax.lines if line.get_marker() == "_"]
    found = [float(value) for line in dashes for value in np.asarray(line.get_ydata())]
    ours = data.dropna(subset=["share"])
    expected = ours.groupby(["cell", "contender"])["schedule_share"].median()
    assert sorted(value for value in found if not np.isnan(value)) == pytest.approx(sorted(expected))


def _names_beside(ax: Axes, figure: Figure) -> list[Bbox]:
    """Where the names right of a panel are drawn, in pixels."""
    renderer = cast("FigureCanvasAgg", figure.canvas).get_renderer()
    texts = [text for text in ax.texts if isinstance(text, Annotation)]
    return [Text.get_window_extent(text, renderer) for text in texts]  # the name, without its line


def test_names_of_eight_contenders_do_not_touch() -> None:
    """Beside lines that end in one point, names of one line and of two are apart, the panel's below too."""
    codecs = [(f"int8:{w}", f"int4:{g}") for w in (64, 256, 2048) for g in (64, 256)]
    changes = [PolicyChanges(weights=w, gradients=g, align=2048) for w, g in codecs]
    contenders = [("zero3", PolicyChanges()), ("hpz+qgz", PolicyChanges(gradients="int8:64", align=2048))]
    contenders += [("zeropp", change) for change in changes]
    records = [
        record_of(Trial(strategy=s, policy=p, cluster=Cluster(rate=rate), steps=4, warmup=1))
        for s, p in contenders
        for rate in ("12.5 Mbit/s", "800 Mbit/s")
    ]
    figure, _, _ = _drawn("speedup", derive(frames_of(records)))
    FigureCanvasAgg(figure).draw()
    boxes = [box for ax in figure.axes for box in _names_beside(ax, figure)]
    assert len(boxes) == 16
    for place, box in enumerate(boxes):
        assert not [other for other in boxes[place + 1 :] if box.overlaps(other.padded(-0.5))]


def test_links_of_different_rates_are_marked_in_the_figures_of_speed_ups() -> None:
    """A setting's dagger stands at its rows, or above its points over rates, and in the caption."""
    for rates in (("50 Mbit/s",), ("50 Mbit/s", "800 Mbit/s")):
        records = [
            _achieving(Trial(strategy=name, cluster=Cluster(rate=rate)), mbit)
            for rate in rates
            for name, mbit in (("zero3", 30.0), ("zeropp", 50.0))
        ]
        figure, data, plot = _drawn("speedup", derive(frames_of(records)))
        said = [text.get_text() for ax in figure.axes for text in (*ax.texts, *ax.get_yticklabels())]
        assert sum("†" in text for text in said) == 2
        assert "†: the links" in plot.caption(data)


def _grid(weights: list[str], gradients: list[str], **changes: Any) -> list[Record]:
    """ZeRO-3, and ZeRO++ with every pair of these codecs."""
    policies = [
        PolicyChanges(weights=w, gradients=g, align=2048, **changes) for w in weights for g in gradients
    ]
    trials = [Trial(strategy="zero3"), *(Trial(strategy="zeropp", policy=policy) for policy in policies)]
    return [record_of(trial.model_copy(update={"steps": 100, "validate_every": 0})) for trial in trials]


def _lines_of(figure: Figure, title: str) -> list[Line2D]:
    """Lines with markers in the first panel of the row of that title."""
    (ax,) = (ax for ax in figure.axes if ax.get_title(loc="left") == title)
    return [line for line in ax.lines if line.get_linestyle() == "-" and line.get_marker() != "None"]


@pytest.mark.parametrize("validated", [True, False])
def test_a_sweep_promises_the_panels_that_it_has(validated: bool) -> None:
    """Its caption speaks of the loss of a validation only where one was taken."""
    records = _grid([f"int{bits}:256" for bits in (8, 6, 4)], ["int4:256"])
    if not validated:
        records = [record.model_copy(update={"validations": []}) for record in records]
    figure, data, plot = _drawn("bits_sweep", derive(frames_of(records)))
    assert ("loss of the last validation" in plot.caption(data)) is validated
    assert len(figure.axes) == 2 + validated


def test_memory_has_the_names_of_other_figures() -> None:
    """A contender is called there as everywhere; the caption says how many ranks share its copy."""
    derived = derive(frames_of(records_of("quickstart", repeats=1)))
    figure, data, plot = _drawn("memory", derived)
    names = {label.get_text() for label in figure.axes[0].get_yticklabels()}
    assert names == set(derived.trials["contender"])
    assert "ZeRO++ 2)" in plot.caption(data)


@pytest.mark.parametrize("suite", ["block_sweep", "bits_sweep"])
def test_a_grid_of_codecs_is_drawn_whole(suite: str) -> None:
    """Of 3 x 3 codecs, weights are swept at each of gradients and the reverse; each marker is one pair's
    trials; no panel shows the diagonal alone.
    """
    if suite == "block_sweep":
        records = _grid([f"int8:{b}" for b in (64, 256, 2048)], [f"int4:{b}" for b in (64, 256, 2048)])
    else:
        records = _grid([f"int{b}:256" for b in (8, 6, 4)], [f"int{b}:256" for b in (8, 6, 4)])
    figure, data, _ = _drawn(suite, derive(frames_of(records)))
    swept = data[data["swept"] != "reference"]
    assert set(swept["swept"]) == {"weights", "gradients"}
    seconds = set(swept["step_seconds"])
    assert len(seconds) == 9
    for title in ("weights", "gradients"):
        lines = _lines_of(figure, title)
        assert [len(np.asarray(line.get_ydata())) for line in lines] == [3, 3, 3]
        assert {float(y) for line in lines for y in np.asarray(line.get_ydata())} == seconds


def test_codecs_that_change_together_are_one_sweep() -> None:
    """Where each size of weights has one of gradients, the line is that of both; a trial more beside the
    diagonal leaves it whole.
    """
    pairs = [(64, 64), (256, 256), (2048, 2048), (2048, 64)]
    trials = [
        Trial(strategy="zeropp", policy=PolicyChanges(weights=f"int8:{w}", gradients=f"int4:{g}", align=2048))
        for w, g in pairs
    ]
    for count, expected in (
        (3, {"weights and gradients": 3}),
        (4, {"weights and gradients": 3, "weights": 2}),
    ):
        data = PLOTS["block_sweep"].data(derive(frames_of([record_of(trial) for trial in trials[:count]])))
        found = {name: len(rows) for name, rows in data.groupby("swept") if name in expected}
        assert found == expected


@pytest.mark.parametrize(
    "others",
    [
        pytest.param({"gradients": "int4:256:stochastic"}, id="rounding"),
        pytest.param({"gradients": "int4:256:hadamard32"}, id="rotation"),
        pytest.param({"gradients": "int4:256:clip"}, id="scale rule"),
        pytest.param({"secondary": 0}, id="group"),
        pytest.param({"prefetch": 0}, id="prefetch"),
    ],
)
def test_policies_that_differ_elsewhere_share_no_marker(others: dict[str, Any]) -> None:
    """Weights swept under two policies give two lines of two names, each of its own trials."""
    changes = [{"gradients": "int4:256"}, {"gradients": "int4:256", **others}]
    trials = [
        Trial(strategy="zeropp", policy=PolicyChanges(weights=f"int{bits}:256", align=2048, **change))
        for change in changes
        for bits in (8, 4)
    ]
    figure, data, _ = _drawn("bits_sweep", derive(frames_of([record_of(trial) for trial in trials])))
    ours = data[data["swept"] == "weights"]
    assert len(set(ours["line"])) == 2
    assert (ours.groupby("line")["bits"].nunique() == 2).all()
    drawn = [float(y) for line in _lines_of(figure, "weights") for y in np.asarray(line.get_ydata())]
    assert sorted(drawn) == sorted(ours["step_seconds"])
