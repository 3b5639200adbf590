"""The figure of a traced step shows the first rank's lanes, of the records' machine and code alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.bench.trace import RankTrace, chrome
from harness.records.trace_record import COMPUTE, RecordError, Trace, path_of, read_traces
from harness.suites.trial import Trial
from impl.comm.ledger import ACROSS, BETWEEN, WAITING, Span
from report.data import caveats
from report.data.frames import frames_of
from report.data.metrics import derive
from report.draw.theme import Style
from report.figures import trace_picture
from tests.report.records import POOL, record_of

TRIAL = Trial(strategy="zeropp")
PLOT = trace_picture.TRACE


def traced(pool: str = POOL, trial: Trial = TRIAL) -> Trace:
    """A step of 2x2 ranks of 4 s: a message between nodes for 2 s, of which half is waited for."""
    spans = [
        Span(COMPUTE, "forward", 10.0, 12.0),
        Span(BETWEEN, "w", 11.0, 13.0, 8),
        Span(WAITING, ACROSS, 12.0, 13.0),
    ]
    ranks = [RankTrace(spans, 4.0 + rank, 3.0, Path("rank.json.gz")) for rank in range(4)]
    return Trace.model_validate(chrome(trial, ranks, pool))


def test_the_figure_shows_the_first_ranks_lanes() -> None:
    """Bars are as long as spans; the caption has the seconds under way, the hidden share, and the step."""
    derived = derive(frames_of([record_of(TRIAL)], [traced()]))
    data = PLOT.table(derived)
    assert set(data["rank"]) == {0}
    (ax,) = PLOT.mark.draw(data, Style()).axes
    bars = [path.get_extents() for collection in ax.collections for path in collection.get_paths()]
    assert [(round(bar.x0), round(bar.x1)) for bar in bars] == [(0, 2000), (1000, 3000), (2000, 3000)]
    assert "under way for 2 s, 50% of this time hidden, in a step of 7 s" in PLOT.caption(data)


@pytest.mark.parametrize("other", [traced("another pool"), traced(trial=Trial(strategy="zeropp", seed=7))])
def test_what_is_not_of_these_records_is_not_drawn_and_said(other: Trace) -> None:
    """A trace of another machine or code, or of an unknown trial, gives a warning."""
    derived = derive(frames_of([record_of(TRIAL)], [other]))
    assert PLOT.table(derived).empty
    assert any("Not drawn: 1 trace" in warning for warning in caveats.warnings(derived))
    without = caveats.warnings(derive(frames_of([record_of(TRIAL)])))
    assert not any("Not drawn" in warning for warning in without)


def test_the_picture_has_a_panel_for_each_rank(tmp_path: Path) -> None:
    """An SVG with the bars of every rank stands beside the trace, which is read as it was written."""
    path = path_of(tmp_path, TRIAL.id)
    path.parent.mkdir()
    path.write_text(traced().model_dump_json())
    assert read_traces(tmp_path) == [traced()]
    picture = trace_picture.write(path)
    assert picture == path.with_suffix(".svg")
    assert picture.read_bytes().count(b'id="axes_') == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not the trace of a step"),
        ('{"traceEvents": []}', "otherData: Field required"),
        (traced().model_dump_json(), "holds the trace of trial"),
        (traced().model_dump_json().replace(f'"cat":"{COMPUTE}"', '"cat":"idling"'),
         f"unknown lane 'idling': expected one of {COMPUTE}"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, content: str, message: str) -> None:
    """The message names a file that is cut off, empty, renamed, or has an unknown lane."""
    path = path_of(tmp_path, "0" * 12)
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(RecordError, match=f"{path.name}.*{message}"):
        read_traces(tmp_path)
