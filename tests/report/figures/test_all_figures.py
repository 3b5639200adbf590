"""Figures are drawn if a suite's records have their data, and only then."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.markers import MarkerStyle

from harness.records import archive
from harness.suites.peers import PEERS
from harness.suites.trial import Cluster, Model, Trial
from impl.adapters.traffic import HOSTED
from impl.policy.presets import SUCCESSORS
from report.data import bytes_and_memory as tables
from report.data import published
from report.data.configuration import STRATEGIES
from report.data.frames import frames_of, load
from report.data.metrics import derive
from report.draw.figure import FORMS, records_behind
from report.draw.theme import Style
from report.figures import all_figures
from report.figures import bytes_and_memory as figures
from tests.report.records import record_of, records_of
from tests.support.params import nightly

REFERENCE = Path(__file__).parents[3] / "results" / "reference"
EXPECTED = {  # of committed records
    "quickstart": {"speedup", "share", "memory", "sent_error", "pareto", "volume", "step_split"},
    "bandwidth": {"speedup_over_rates", "throughput", "beside_published", "memory", "volume", "step_split"},
    "convergence": {"speedup", "share", "loss", "net_speed", "final_loss", "memory", "volume", "step_split"},
    "nodes": {"speedup", "share", "memory", "scaling", "volume", "step_split"},
    "stages": {"largest_model", "step_split"},
    "generation": {"generation"},
}


@pytest.mark.parametrize("suite", EXPECTED)
def test_figures_appear_with_their_data_and_only_then(suite: str, tmp_path: Path) -> None:
    """A suite's records give exactly its figures, with ids and captions; each is drawn in all forms with the
    first suite that has it.
    """
    derived = derive(load(archive.unpack(REFERENCE / f"{suite}.tar.xz", tmp_path)))
    earlier = [EXPECTED[other] for other in list(EXPECTED)[: list(EXPECTED).index(suite)]]
    tried = set[str]().union(*earlier)
    tables = [(plot, plot.table(derived)) for plot in all_figures.FIGURES]
    tables = [(plot, data) for plot, data in tables if not data.empty]
    assert {plot.name for plot, _ in tables} == EXPECTED[suite]
    for plot, data in tables:
        assert plot.name != "generation" or "2.17 (30B) and 2.25 (66B)" in plot.caption(data)
        assert records_behind(data)
        assert set(records_behind(data)) <= set(derived.frames.trial_of)
        assert plot.caption(data)
        assert plot.question in plot.alt
        if plot.name in tried:
            continue
        assert plot.draw(derived, tmp_path, Style(), FORMS) is not None
        forms_of = {path.suffix: path for path in tmp_path.glob(f"{plot.name}.*")}
        assert set(forms_of) == {".svg", ".pdf", ".png", ".csv"}
        assert all(path.stat().st_size > 0 for path in forms_of.values())
        (wide,) = re.findall(r'<svg [^>]*?width="([0-9.]+)pt"', forms_of[".svg"].read_text(encoding="utf-8"))
        assert float(wide) / 72 * 25.4 == pytest.approx(178, abs=0.01)  # two columns of a journal
        pdf = forms_of[".pdf"].read_bytes()
        (wide,) = re.findall(rb"/MediaBox \[ 0 0 ([0-9.]+) ", pdf)
        assert float(wide) / 72 * 25.4 == pytest.approx(178, abs=0.01)
        assert pdf.count(b"/FontFile2") > 0 == pdf.count(b"/Type3")  # it carries its fonts
        assert len(pd.read_csv(forms_of[".csv"])) == len(data)


@pytest.mark.long
@pytest.mark.parametrize("suite", ["bandwidth", *nightly("quickstart")])
def test_figures_fit_a_column_of_a_paper(suite: str, tmp_path: Path) -> None:
    """They can be drawn 84 mm wide: panels above one another, wrapped lines, fewer columns of legends."""
    derived = derive(frames_of(records_of(suite, repeats=2)))
    for plot in all_figures.FIGURES:
        if (drawing := plot.draw(derived, tmp_path, Style(84.0))) is not None:
            (wide,) = re.findall(rb'<svg [^>]*?width="([0-9.]+)pt"', drawing.svg)
            assert float(wide) / 72 * 25.4 == pytest.approx(84, abs=0.01), plot.name


def test_one_process_alone_draws_no_comparison(tmp_path: Path) -> None:
    """A single trial on one node has a step to split, and neither link nor speed-up nor volume."""
    alone = Trial(strategy="zero3", cluster=Cluster(nodes=1, ranks_per_node=1))
    derived = derive(frames_of([record_of(alone)]))
    drawn = {plot.name for plot in all_figures.FIGURES if plot.draw(derived, tmp_path, Style())}
    assert drawn == {"step_split"}


def test_speedups_on_one_node_are_drawn_beside_those_on_several() -> None:
    """The figure has every setting with seconds; it once left out the settings of one node, which tables have."""
    clusters = [Cluster(nodes=1, ranks_per_node=4), Cluster(nodes=2, rate="1 Gbit/s")]
    trials = [Trial(strategy=name, cluster=at) for at in clusters for name in ("zero3", "zeropp")]
    derived = derive(frames_of([record_of(trial) for trial in trials]))
    shown = {plot.name: set(plot.table(derived).get("nodes", ())) for plot in all_figures.FIGURES}
    assert shown["speedup"] == {1, 2}
    assert shown["share"] == {2}  # one node has no link that bounds a step


def test_names_with_dollars_and_foreign_letters_are_drawn(tmp_path: Path) -> None:
    """Model names that TeX, XML or the font cannot take do not stop a figure."""
    names = ("a$^{:b", "<script>:&'\"", "模型:\x07" + "long " * 40)
    trials = [Trial(strategy=s, model=Model(name=n)) for n in names for s in ("zero3", "hpz", "zeropp")]
    derived = derive(frames_of([record_of(trial) for trial in trials]))
    drawn = {plot.name for plot in all_figures.FIGURES if plot.draw(derived, tmp_path, Style())}
    assert {"speedup", "share", "step_split", "volume", "memory"} <= drawn


def test_each_policy_has_its_own_colour_and_marker() -> None:
    """No two strategies share a colour.  Markers are filled; one library's settings share one, so do a host
    and its guests; stages, groups and successors share theirs with strategies no suite runs beside them.
    """
    markers = {name: look.marker for name, look in STRATEGIES.items()}
    assert len({look.colour for look in STRATEGIES.values()}) == len(STRATEGIES)
    shared = {name: markers[name] for name in ("zero0", "zero1", "zero2", "mics")}
    assert len({*shared.values(), markers["zero3"]}) == len(shared) + 1
    assert set(markers.values()) <= set(MarkerStyle.filled_markers)
    published = [markers[name] for name in (*SUCCESSORS, "exact", "zero3", "zero3-flat", "zeropp")]
    assert len({*published}) == len(published)
    apart = {*HOSTED, *shared, *SUCCESSORS}
    alone = {name: marker for name, marker in markers.items() if name not in apart}
    settings_of = {name: name.partition("-")[0] if name in PEERS else name for name in alone}
    assert len(set(alone.values())) == len(set(settings_of.values()))
    assert all(markers[name] == alone[host] for name, (host, _) in HOSTED.items())


def test_the_next_size_is_one_that_was_refused_under_the_same_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger limit may fit a size that a smaller one refuses; each panel shows what its own limit refused."""
    sizes = [(8, 1, True), (8, 2, False), (8, 3, False), (16, 2, True), (16, 3, True), (16, 4, False)]
    rows = pd.DataFrame(
        [(limit * 2**20, size * 1e6, trained, "ZeRO-3") for limit, size, trained in sizes],
        columns=["limit_bytes", "parameters", "trained", "configuration"],
    )
    monkeypatch.setattr(tables, "under_limits", lambda _: rows)
    shown = figures._largest(derive(frames_of(records_of("quickstart", repeats=1))))
    assert shown.groupby("where")["next_size_not_run"].unique().map(list).to_dict() == {
        "8 MiB a rank": [2],
        "16 MiB a rank": [4],
    }


def test_published_numbers_are_those_of_the_blog() -> None:
    """Parity 50/47 and 48/48, volume 3M to 0.75M, and the throughput table's speed-ups."""
    parity = published.parity().set_index("model")
    assert parity.loc[["18B", "138B"], ["zeropp", "zero3"]].to_numpy().tolist() == [[50, 47], [48, 48]]
    assert set(zip(parity["low_gbps"], parity["high_gbps"], strict=True)) == {(200, 800)}
    volume = published.volume().set_index("method")
    assert (volume.loc["zero3", "total_m"], volume.loc["zeropp", "total_m"]) == (3, 0.75)
    assert set(volume.index) == {
        "zero3", "qwz", "hpz", "qgz", "qwz+hpz", "qwz+qgz", "hpz+qgz", "zeropp"
    }  # fmt: skip
    parts = ["forward_all_gather_m", "backward_all_gather_m", "gradient_reduce_scatter_m"]
    assert (volume[parts].sum(axis=1) == volume["total_m"]).all()
    shown = published.throughput().set_index(["model", "inter_node_gbps", "tokens_per_gpu"])
    assert shown.loc[("18B", 100, 1024), "speedup"] == pytest.approx(31 / 14)
