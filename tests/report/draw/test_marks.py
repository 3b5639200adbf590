"""Marks show estimates, intervals, values and names, as read from their axes."""

from __future__ import annotations

import io
import re

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawn
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator

from harness.records.trial_record import Record
from harness.suites.trial import Cluster, Trial
from report.data import speedups
from report.data.configuration import STRATEGIES
from report.data.frames import frames_of
from report.data.metrics import Derived, derive
from report.draw import axes
from report.draw.figure import Figure, laid_out, style_of
from report.draw.marks import Lines, Measure, Rows, front
from report.draw.names_of_rows import peers_named, peers_note
from report.draw.theme import COLUMN, Style, fonts, looks_of
from report.figures.all_figures import FIGURES
from report.tables import all_tables as tables
from tests.report.records import busy_while_waiting, changed_steps, on_link, record_of, records_of

BY_NAME = {figure.name: figure for figure in FIGURES}
_NUMBERS = st.integers(0, 5).map(float)


def _drawn(name: str, derived: Derived) -> tuple[Drawn, pd.DataFrame, Figure]:
    figure = BY_NAME[name]
    data = figure.table(derived)
    with fonts():
        return figure.mark.draw(data, style_of(derived)), data, figure


def _labels(ax: Axes) -> list[str]:
    return [text.get_text().replace("\n", " ") for text in ax.texts]


@given(st.lists(st.tuples(_NUMBERS, _NUMBERS), min_size=1, max_size=12))
def test_the_front_has_what_nothing_beats(points: list[tuple[float, float]]) -> None:
    """No other row beats one on it, and each row off it is beaten or equalled by one on it."""
    kept = list(front(pd.DataFrame(points)).index)
    ahead = [points[place] for place in kept]
    assert ahead == sorted(set(ahead))
    for place, (sent, value) in enumerate(points):
        beaten = any(point != (sent, value) and point[0] <= sent and point[1] <= value for point in points)
        assert (place in kept) <= (not beaten)
        assert place in kept or any(fewer <= sent and less <= value for fewer, less in ahead)


@pytest.mark.parametrize("width", [84.0, 178.0])
@pytest.mark.parametrize(("count", "name"), [(1, "ZeRO-3"), (11, "qgZ (g int2:128, feedback classic:all)")])
def test_a_legend_of_many_long_names_fits(count: int, name: str, width: float) -> None:
    """The figure has the requested width; four columns of such names once left its panels no width at all."""
    rows = [
        {"configuration": f"{name}{'i' * number}", "strategy": "qgz", "place": 0, "first": number, "panel": "p",
         "x": x, "y": 1.0, "id": "0"}
        for number in range(count) for x in (1.0, 2.0)
    ]  # fmt: skip
    mark = Lines("x", "x", (Measure("y", "y", ""),))
    drawing = Figure(name="many", title="Many", question="?", mark=mark)
    pdf = drawing.render(pd.DataFrame(rows), Style(width), ("pdf",))["pdf"]
    (wide,) = re.findall(rb"/MediaBox \[ 0 0 ([0-9.]+) ", pdf)
    assert float(wide) / 72 * 25.4 == pytest.approx(width, abs=0.01)


def test_labels_of_neighbouring_panels_do_not_overlap() -> None:
    """Four panels stand in two rows of two, and a label that is wider than its panel has several lines."""
    titles = [
        f"optimizer Muon, adamw lr 0.001, lr {rate}: {name}"
        for name in ("optimizer steps", "MB sent between nodes")
        for rate in (0.01, 0.02)
    ]
    rows = [
        {"configuration": "ZeRO-3", "strategy": "zero3", "place": 0, "first": 0, "panel": title, "x": x, "y": 1.0}
        for title in titles for x in (1.0, 2.0)
    ]  # fmt: skip
    style = Style(178.0)
    with fonts():
        figure = Lines("x", "", (Measure("y", "y", ""),)).draw(pd.DataFrame(rows), style)
        laid_out(figure, style)
        figure.draw_without_rendering()
        panels = figure.get_axes()
        places = [ax.get_subplotspec() for ax in panels]
        assert [place.get_geometry()[:2] for place in places if place is not None] == [(2, 2)] * 4
        boxes = [ax.xaxis.label.get_window_extent() for ax in panels]
    for left, right in (boxes[:2], boxes[2:]):
        assert left.x1 < right.x0


@pytest.mark.filterwarnings("error")  # constrained_layout not applied because axes sizes collapsed to zero
def test_a_narrow_figure_is_as_wide_as_names_of_rows_need() -> None:
    """On a telephone's screen panels beside long names once had no width."""
    names = [letter * 70 for letter in "ab"]
    rows = [
        {"configuration": name, "strategy": "zero3", "place": 0, "first": n, "setting": "c", "where": "w",
         "seconds": 1.5, "id": name}
        for n, name in enumerate(names)
    ]  # fmt: skip
    mark = Rows((Measure("seconds", "s", "said"),))
    drawing = Figure(name="x", title="X", question="?", mark=mark)
    svg = drawing.render(pd.DataFrame(rows), Style(COLUMN, looks_of(("zero3", name) for name in names)))[
        "svg"
    ]
    (wide,) = re.findall(rb'<svg [^>]*width="([0-9.]+)pt"', svg)
    assert float(wide) / 72 * 25.4 > COLUMN


def test_ticks_that_come_and_go_with_the_width_are_inside_the_figure() -> None:
    """A wide axis has a tick at its end, whose label makes it narrower, so that the tick goes; none is cut off."""

    class AtTheEnd(FixedLocator):
        def __call__(self) -> list[float]:
            assert self.axis is not None
            return [0.0, 1.0] if self.axis.axes.bbox.width / 100 > style.inches - 0.18 else [0.0]

    style = Style(178.0)
    with fonts():
        figure, ((ax,),) = axes.grid(style, 1, 1, [2.0])
        ax.set_xlim(0, 1)
        ax.set_yticks([])
        ax.xaxis.set_major_locator(AtTheEnd([0.0, 1.0]))
        ax.xaxis.set_major_formatter(lambda value, _: "a long label" if value else "0")
        box = laid_out(figure, style)
        figure.draw_without_rendering()
        drawn = figure.get_tightbbox()
    assert box.x0 <= drawn.x0
    assert drawn.x1 <= box.x1


def test_bars_intervals_and_values_are_those_of_the_table() -> None:
    """The point is the Summary's speed-up, the line its interval, and the dots are the six pairs."""
    derived = derive(frames_of(records_of("quickstart", repeats=6)))
    figure, data, _ = _drawn("speedup", derived)
    left = figure.axes[0]
    table = tables.MAKERS["summary"](derived).data.set_index("configuration")
    bars = [collection for collection in left.collections if hasattr(collection, "get_segments")]
    spans = [segment[:, 0] for bar in bars for segment in bar.get_segments()]
    speedup = table.loc["ZeRO++", "speedup"]
    assert any(np.allclose(span, [speedup.low, speedup.high]) for span in spans)
    assert f"{speedup.estimate:.2f}" in _labels(left)
    dots = np.concatenate([np.ma.getdata(collection.get_offsets())[:, 0] for collection in left.collections])
    assert set(np.round(data["speedup"], 9)) <= set(np.round(dots, 9))


def test_each_share_has_its_stroke_at_the_schedules() -> None:
    """Each bar is as long as the share with processors, and its stroke stands at the one without them."""
    derived = derive(frames_of([busy_while_waiting(r) for r in records_of("quickstart")]))
    figure, data, drawn = _drawn("share", derived)
    ax = figure.axes[0]
    shares = data.groupby("configuration", sort=False)[["share", "schedule_share"]].median()
    assert (shares["share"] > shares["schedule_share"]).all()
    bars = [bar.get_width() for bar in ax.patches if isinstance(bar, Rectangle)]
    (strokes,) = (line for line in ax.lines if line.get_marker() == "|")
    assert sorted(bars) == pytest.approx(sorted(shares["share"]))
    assert sorted(np.asarray(strokes.get_xdata(), float)) == pytest.approx(sorted(shares["schedule_share"]))
    assert "processor seconds of all ranks" in drawn.caption(data)


def test_points_over_rates_are_the_summarys() -> None:
    """Estimates of two uneven repeats are the Summary's."""

    def uneven(record: Record) -> Record:
        longer = {"zeropp": 5}.get(record.trial["strategy"], 3) if record.trial["repeat"] else 1
        return changed_steps(record, lambda step: {"total": longer * step.total})

    derived = derive(frames_of([uneven(record) for record in records_of("bandwidth", repeats=2)]))
    rows = tables.MAKERS["summary"](derived).data
    figure, _, _ = _drawn("speedup_over_rates", derived)
    marked = [float(y) for ax in figure.axes for line in ax.lines for y in np.atleast_1d(line.get_ydata())]
    estimates = [speedup.estimate for speedup in rows[rows["configuration"] == "ZeRO++"]["speedup"]]
    assert len(estimates) > 3
    assert all(np.isclose(marked, value, rtol=1e-9).any() for value in estimates)


def test_a_part_of_what_a_rank_holds_is_as_long_as_its_bytes() -> None:
    """Bars add up to the sum of the table, the stroke stands at the formula, and names are alike."""
    derived = derive(frames_of(records_of("quickstart", repeats=1)))
    figure, _, _ = _drawn("memory", derived)
    ax = figure.axes[0]
    table = tables.MAKERS["memory"](derived).data.set_index("configuration")
    lengths = sum(bar.get_width() for bar in ax.patches if isinstance(bar, Rectangle))
    assert lengths == pytest.approx(table["engine_mib"].sum())
    (strokes,) = (line for line in ax.lines if line.get_marker() == "|")
    assert sorted(np.asarray(strokes.get_xdata(), float)) == pytest.approx(sorted(table["formula_mib"]))
    assert {label.get_text() for label in ax.get_yticklabels()} == set(derived.trials["configuration"])


def test_a_step_is_divided_into_the_summarys() -> None:
    """Parts of each configuration add up to the step that the Summary prints."""
    derived = derive(frames_of(records_of("quickstart", repeats=3)))
    _, data, _ = _drawn("step_split", derived)
    sums = data.groupby(["configuration", "id"])["seconds"].sum().groupby("configuration").mean()
    for name, trials in derived.trials.groupby("configuration"):
        assert sums[name] == pytest.approx(speedups.step_interval(trials).estimate)


def test_a_caption_says_of_whom_exposed_time_is_not_known() -> None:
    """It names such configurations, and says nothing without them."""
    for strategies, unknown in ((("ddp", "exact", "zero3"), True), (("zero3", "zeropp"), False)):
        derived = derive(frames_of([record_of(Trial(strategy=strategy)) for strategy in strategies]))
        _, data, drawn = _drawn("step_split", derived)
        assert ("The exposed communication of DDP is not known" in drawn.caption(data)) is unknown


def test_links_of_different_rates_are_marked() -> None:
    """A setting's dagger stands at its rows, or above its points over rates, and in the caption."""
    for name, rates in (("speedup", ("50 Mbit/s",)), ("speedup_over_rates", ("50 Mbit/s", "800 Mbit/s"))):
        records = [
            on_link(record_of(Trial(strategy=strategy, cluster=Cluster(rate=rate))), mbit)
            for rate in rates
            for strategy, mbit in (("zero3", 30.0), ("zeropp", 50.0))
        ]
        figure, data, drawn = _drawn(name, derive(frames_of(records)))
        texts = [text.get_text() for ax in figure.axes for text in (*ax.texts, *ax.get_yticklabels())]
        assert sum("†" in text for text in texts) >= 2
        assert "†: the links" in drawn.caption(data)


def test_captions_say_what_a_dot_is() -> None:
    """A dot of speed-ups is a pair of trials, a dot of other values is one trial; a figure that has both says which."""
    table = pd.DataFrame({"seconds": [1.0], "speedup": [2.0]})
    seconds, speedup = Measure("seconds", "s", ""), Measure("speedup", "speed-up", "", dot="pair of trials")
    assert "Each dot is one trial." in Rows((seconds,)).says(table)
    assert "Each dot is one pair of trials." in Rows((speedup,)).says(table)
    both = Rows((seconds, speedup)).says(table)
    assert "Each dot is one trial (s), or one pair of trials (speed-up)." in both


def test_captions_say_what_types_peers_send() -> None:
    """Where DDP or FSDP2 stand beside policies, captions say that they send fp32, and what gloo does."""
    derived = derive(frames_of(records_of("bandwidth", repeats=1)))
    for name in ("throughput", "speedup_over_rates", "volume", "step_split"):
        caption = BY_NAME[name].caption(BY_NAME[name].table(derived))
        assert "FSDP2 sends fp32; on gloo, FSDP2's reduce-scatter sends the bytes of" in caption
    assert peers_note(pd.DataFrame({"strategy": ["ddp", "zero3"]})) == "DDP sends fp32."
    assert peers_note(pd.DataFrame({"strategy": ["zero3", "single"]})) == ""
    names = ["DDP", "DDP, bf16 hook", "DeepSpeed", "DeepSpeed (compute bf16)"]
    several = pd.DataFrame(
        {"strategy": ["ddp", "ddp-bf16", "deepspeed", "deepspeed"], "configuration": names}
    )
    note = peers_note(several)
    assert (
        note == 'DeepSpeed sends the type in which it computes; DDP sends fp32; "DDP, bf16 hook" sends bf16.'
    )


def test_a_librarys_name_stands_for_all_of_its_peers() -> None:
    """It does so in captions if all peers of the library are meant; else names with commas are in quotation marks."""
    shown = ["ddp", "ddp-tuned", "ddp-bf16", "fsdp2", "fsdp2-kept", "zero3"]
    assert peers_named(shown[:5], shown) == ["DDP", "FSDP2"]
    assert peers_named(shown[:2], shown) == ["DDP", '"DDP, tuned"']
    assert peers_named(["fsdp2"], shown) == ["FSDP2"]


def test_the_size_of_m_is_told_of_every_place() -> None:
    """M is that of one gather, by number of nodes, whatever the micro-batches of a step."""
    trials = [
        Trial(strategy="zero3", cluster=Cluster(nodes=nodes), accumulation=accumulation)
        for nodes, accumulation in ((2, 1), (2, 2), (4, 1))
    ]
    derived = derive(frames_of([record_of(trial) for trial in trials]))
    _, data, drawn = _drawn("volume", derived)
    numel = derived.trials.drop_duplicates("nodes").set_index("nodes")["numel"]
    two, four = (f"{2 * numel[nodes] * (nodes - 1) / 1e6:.2f} MB" for nodes in (2, 4))
    for size in (f"gpt-small: {two}", f"gpt-small, 2 micro-batches: {two}", f"gpt-small: {four}"):
        assert size in drawn.caption(data)


@given(st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=8))
def test_ticks_of_a_log_axis_are_in_view_and_few(values: list[float]) -> None:
    """At least one and at most nine; none beyond the limits."""
    ax = Drawn().subplots()
    ax.set_xlim(min(values) / 2, max(values) * 2)
    axes.log_ticks(ax, "x")
    ticks = [tick for tick in ax.get_xticks() if min(values) / 2 <= tick <= max(values) * 2]
    assert 1 <= len(ticks) <= 9


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([24.04, 95.2, 381.0], ["24.0", "95.2", "381"]),
        ([24.0, 24.1, 381.0], ["24.0", "381"]),  # one tick would cover the other
        ([], ["10", "20", "50", "100", "200"]),
        ([20.0 * 1.3**power for power in range(9)], ["10", "20", "50", "100", "200"]),
    ],
)
def test_ticks_of_a_log_axis_are_at_its_values_if_these_are_few(
    values: list[float], ticks: list[str]
) -> None:
    """A tick at each of up to eight values; rates of 25 and 400 Mbit/s once had none."""
    figure = Drawn()
    ax = figure.subplots()
    ax.set_xlim(10, 400)
    axes.log_ticks(ax, "x", values)
    figure.draw_without_rendering()
    shown = zip(ax.get_xticks(), ax.get_xticklabels(), strict=True)
    assert [label.get_text() for tick, label in shown if 10 <= tick <= 400] == ticks


def test_rates_of_a_link_have_ticks() -> None:
    """A figure over rates has one tick at the achieved rate of each setting, in each panel."""
    figure, data, _ = _drawn("speedup_over_rates", derive(frames_of(records_of("bandwidth", repeats=1))))
    for ax, (_, rows) in zip(figure.axes, data.groupby("panel", sort=False), strict=False):
        assert list(ax.get_xticks()) == pytest.approx(
            sorted(rows.groupby("setting")["achieved_mbit"].median())
        )


def test_a_row_without_a_value_has_none() -> None:
    """A measure without values has no panel; configurations without a value of one have empty rows."""
    rows = [
        {"configuration": name, "strategy": name, "place": 0, "first": n, "setting": "c", "where": "w", "a": 1.0,
         "b": value, "c": np.nan, "id": name}
        for n, (name, value) in enumerate((("x", 2.0), ("y", np.nan)))
    ]  # fmt: skip
    mark = Rows(tuple(Measure(column, column, "said") for column in "abc"))
    with fonts():
        figure = mark.draw(pd.DataFrame(rows), Style(looks=looks_of([("x", "x"), ("y", "y")])))
    assert [ax.get_xlabel() for ax in figure.axes] == ["a", "b"]
    assert _labels(figure.axes[1]) == ["2.00"]


def _in_settings(values: list[list[float]]) -> pd.DataFrame:
    """A table of one row per value; each list has the values of a setting, one for each of its configurations."""
    return pd.DataFrame([
        {"configuration": f"c{n}", "strategy": f"c{n}", "place": 0, "first": n, "setting": f"s{number}",
         "where": f"2x2 ranks, {number} Mbit/s", "seconds": value, "id": f"{number}{n}"}
        for number, row in enumerate(values) for n, value in enumerate(row)
    ])  # fmt: skip


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("width", [84.0, 178.0])
def test_each_setting_has_a_panel_and_all_share_the_ends_of_their_axis(width: float, *, log: bool) -> None:
    """A setting's panel has its title and its configurations alone; a setting without values has an empty panel."""
    data = _in_settings([[1.0, 2.0], [50.0], [np.nan, np.nan]])
    mark = Rows((Measure("seconds", "s", "said", bar=False, log=log),))
    with fonts():
        figure = mark.draw(data, Style(width, looks_of((f"c{n}", f"c{n}") for n in range(2))))
        laid_out(figure, Style(width))
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["0 Mbit/s", "1 Mbit/s", "2 Mbit/s"]
    rows = [[label.get_text() for label in ax.get_yticklabels()] for ax in figure.axes]
    assert rows[:2] == [["c0", "c1"], ["c0"]]
    assert [_labels(ax) for ax in figure.axes] == [["1.00", "2.00"], ["50.0"], []]
    ((low, high),) = {ax.get_xlim() for ax in figure.axes}
    assert low <= 1.0
    assert high >= 50.0
    assert {ax.get_xscale() for ax in figure.axes} == {"log" if log else "linear"}
    assert "first" not in mark.says(data)


def test_a_caption_counts_the_settings_that_have_no_panel() -> None:
    """Of twelve settings, eight are drawn."""
    data = _in_settings([[1.0]] * 12)
    mark = Rows((Measure("seconds", "s", "said"),))
    with fonts():
        figure = mark.draw(data, Style(looks=looks_of([("c0", "c0")])))
    assert len(figure.axes) == 8
    assert "The figure shows the first 8 of 12 settings; its CSV has all." in mark.says(data)


def test_settings_of_the_user_change_no_figure() -> None:
    """A user's matplotlibrc changes no byte: equal records give equal files."""

    def drawn() -> bytes:
        buffer = io.BytesIO()
        with fonts():
            figure, ax = plt.subplots()
            ax.plot([1, 2], [1e5, 3e5])
            ax.set_title("words")
            figure.savefig(buffer, format="svg", metadata={"Date": None})
            plt.close(figure)
        return buffer.getvalue()

    user = {"svg.fonttype": "none", "font.family": ["monospace"], "axes.axisbelow": False}
    user |= {"axes.facecolor": "black", "lines.linewidth": 5.0}
    with mpl.rc_context(user | {"figure.constrained_layout.use": False}):
        changed = drawn()
    assert changed == drawn()


def test_configurations_of_one_strategy_look_different_and_the_first_like_the_strategy() -> None:
    """Ten codecs of one policy are ten pairs of colour and marker."""
    named = [("zeropp", f"ZeRO++ ({number})") for number in range(10)] + [("qwz", "qwZ")]
    looks = looks_of(named)
    assert len({(look.colour, look.marker) for look in looks.values()}) == len(named)
    assert looks["ZeRO++ (0)"].colour == STRATEGIES["zeropp"].colour
    assert looks["qwZ"].colour == STRATEGIES["qwz"].colour
