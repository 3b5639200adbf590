"""A results folder becomes a page and its files."""

from __future__ import annotations

import base64
import json
import re
import resource
import shutil
import signal
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise, product
from pathlib import Path
from typing import Literal
from unittest import mock
from urllib.parse import unquote

import psutil
import pytest

from docs.numbers import REFERENCE, ROOT
from harness import cli
from harness.cluster.interrupts import REFUSED
from harness.measure import machine
from harness.records.trial_record import Failure, RecordError, write
from harness.suites.trial import Cluster, PolicyChanges, Trial
from report.build import build
from report.command import report_after_run
from report.data.frames import ReportError, frames_of
from report.data.metrics import derive
from report.page import heading, unbroken
from tests.harness.cluster.test_rank_processes import until
from tests.harness.records.test_record_checks import halved
from tests.report.records import CRASHED, changed, record_of, records_of, taken_by_others
from tests.support.params import nightly

HOSTILE = "<script>alert('x')</script> & \"quoted\" $\\input{x}$ |pipe| `tick` {{ 7 * 7 }}"


class _Page(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str, attribute: str) -> list[str]:
        return [values[attribute] or "" for name, values in self.tags if name == tag and attribute in values]


def _folder(path: Path, suite: str) -> Path:
    for record in records_of(suite, repeats=2):
        write(path, record)
    return path


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = _folder(tmp_path_factory.mktemp("results"), "quickstart")
    failure = Failure(kind="crashed", message=f"{HOSTILE}\nsecond line", log=f"logs/{HOSTILE}.log")
    write(folder, record_of(Trial(strategy="hpz", seed=7), suite=HOSTILE, failure=failure))
    build(folder)
    return folder


def test_the_page_stands_alone(quickstart: Path) -> None:
    """No script and nothing loaded from elsewhere; figures are inside, each with a text."""
    text = (quickstart / "report.html").read_text()
    page = _Page(text)
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object", "embed", "base"}
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert "url(" not in text.split("</style>")[0]
    assert len(page.all("img", "src")) >= 5
    assert all(image.startswith("data:image/svg+xml;base64,") for image in page.all("img", "src"))
    assert all(len(alt) > 30 for alt in page.all("img", "alt"))


def test_every_link_leads_somewhere(quickstart: Path) -> None:
    """Links are anchors of the page or files beside it."""
    page = _Page((quickstart / "report.html").read_text())
    anchors = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    links = page.all("a", "href")
    assert any(link.endswith(".svg") for link in links)
    for link in links:
        if link.startswith("#"):
            assert link[1:] in anchors
        else:
            assert (quickstart / unquote(link)).is_file()


def test_a_narrow_screen_scrolls_only_inside_tables(quickstart: Path) -> None:
    """Tables lie in boxes that scroll; images are no wider than the page and lead to their drawings; the
    first has a drawing of 84 mm for narrow screens.
    """
    text = (quickstart / "report.html").read_text()
    page = _Page(text)
    for (outer, around), (tag, _) in pairwise(page.tags):
        if tag == "table":
            assert (outer, around["class"], around["tabindex"]) == ("div", "wide", "0")
        if tag == "picture":
            assert (around["href"] or "").endswith(".svg")
    (narrow,) = page.all("source", "srcset")
    svg = base64.b64decode(narrow.removeprefix("data:image/svg+xml;base64,"), validate=True)
    assert b'width="238.1' in svg.partition(b"<svg ")[2].partition(b">")[0]  # points
    assert ".wide { overflow-x: auto; }" in text
    assert any("max-width: min(100%" in rule.split("}")[0] for rule in text.split("figure img {"))


def test_failures_are_listed_and_hostile_text_is_escaped_in_every_form(quickstart: Path) -> None:
    """A failed trial has kind, message and log on the page and in its table; markup in names, messages
    and paths is printed, not obeyed: HTML, SVG, Markdown and LaTeX.
    """
    page = _Page((quickstart / "report.html").read_text())
    for text in ("crashed", f"{HOSTILE} second line", f"logs/{HOSTILE}.log", "{{ 7 * 7 }}"):
        assert text in page.text
    assert "crashed" in (quickstart / "tables" / "failures.md").read_text()
    for path in [quickstart / "report.html", *quickstart.glob("*/*.md"), *quickstart.glob("*/*.svg")]:
        assert "<script" not in path.read_text()
    assert not [path for path in quickstart.glob("*/*.tex") if "\\input{" in path.read_text()]


def test_the_page_begins_with_question_sentence_verdicts_and_figure(quickstart: Path) -> None:
    """The first paragraph is on the largest difference, the verdicts and their figure follow, then the rest."""
    text = (quickstart / "report.html").read_text()
    page = " ".join(_Page(text).text.split())
    assert "Inconclusive (two pairs; a verdict needs six): ZeRO++ is 3." in page
    assert ", the largest of 4 differences." in page
    places = [
        text.index(part)
        for part in (
            '<p class="headline">',
            '<section id="table-verdicts"',
            '<figure id="speedup">',
            '<dl class="facts">',
            "<nav",
        )
    ]
    assert places == sorted(places)
    assert text.count('<figure id="speedup">') == 1


def test_a_number_of_configurations_is_followed_by_the_number_of_their_settings() -> None:
    """The sentence counts a comparison for each setting, so that it may count more of them."""
    strategies = ("fsdp2", "fsdp2-kept-prefetch", "ddp-tuned", "ddp-bf16", "deepspeed-hpz", "zero3")
    one = [record_of(Trial(strategy=strategy)) for strategy in strategies]
    two = [*one, *(record_of(Trial(strategy=strategy, tokens_per_rank=1024)) for strategy in strategies)]
    assert heading(derive(frames_of(one))) == ("5 configurations against", "ZeRO-3")
    assert heading(derive(frames_of(two))) == ("5 configurations in 2 settings against", "ZeRO-3")


@pytest.mark.parametrize(
    ("cell", "printed"),
    [
        ("2.36 (2.05 to 2.72) ▲", "2.36 (2.05~to~2.72)~▲"),
        ("+0.0113 ± 0.0060 ▽", "+0.0113 ±~0.0060~▽"),
        ("-0.0006 to +0.0004", "-0.0006 to~+0.0004"),
        (
            "not reached: 3.38 against 2.91; 0.58 ± 0.03 at 3.38",
            "not reached: 3.38 against 2.91; 0.58 ±~0.03 at 3.38",
        ),
        ("1.00", "1.00"),
    ],
)
def test_a_cell_breaks_before_its_interval_only(cell: str, printed: str) -> None:
    """Wide tables of verdicts fit a page so; ``~`` is a space at which no line ends."""
    assert unbroken(cell) == printed.replace("~", "\u00a0")


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("strategies", "title"),
    [
        (("ddp", "zero3", "qwz", "zeropp"), "DDP, qwZ and ZeRO++ against ZeRO-3"),
        (("zero3", "zero0"), "ZeRO-0 against ZeRO-3"),
        (("fsdp2", "fsdp2-kept-prefetch", "ddp-tuned", "ddp-bf16", "deepspeed-hpz", "zero3"),
         "5 configurations against ZeRO-3"),
        (("zeropp",), "ZeRO++"),
        (("zero3",), "ZeRO-3"),
    ],
)  # fmt: skip
def test_the_title_names_who_is_there(strategies: tuple[str, ...], title: str, tmp_path: Path) -> None:
    """ZeRO++ stands in it only where one of its trials has finished."""
    for strategy in strategies:
        write(tmp_path, record_of(Trial(strategy=strategy), suite="titles"))
    write(tmp_path, record_of(Trial(strategy="zeropp", seed=7), suite="titles", failure=CRASHED))
    text = build(tmp_path).read_text()
    assert f"<title>{title}: titles</title>" in text
    assert " ".join(re.sub("<[^>]*>", "", text[text.index("<h1>") : text.index("</h1>")]).split()) == title


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("without", [True, False])
def test_what_a_suite_compares_is_in_its_head(without: bool, tmp_path: Path) -> None:
    """If a suite compares int6 with int8, so do title, headline and figures, also beside ZeRO-3."""
    sides = [("zeropp", "int8:64", "baseline"), ("zeropp", "int6:64", "contrast")]
    sides += [] if without else [("zero3", None, "")]
    for repeat, (strategy, weights, role) in product(range(6), sides):
        trial = Trial(strategy=strategy, policy=PolicyChanges(weights=weights), repeat=repeat)
        write(tmp_path, record_of(trial, suite="asked", role=role))
    text = build(tmp_path).read_text()
    names = [f"ZeRO++ (w {weights})" for weights in ("int6:64", "int8:64")]
    assert f"<title>{' against '.join(names)}: asked</title>" in text
    page = " ".join(_Page(text).text.split())
    assert "ZeRO++ (weights int6:64) " in page
    assert "ZeRO++ (weights int8:64) " in page
    assert f"Speed-up over {names[1]}" in page
    drawn = (tmp_path / "figures" / "speedup.csv").read_text()
    assert "ZeRO-3" not in drawn or not without


@pytest.mark.usefixtures("undrawn")
def test_the_page_marks_trials_of_which_others_had_processors(tmp_path: Path) -> None:
    """A warning counts them, the facts say how much was taken, and their records are marked; undisturbed ones
    have no warning; without the machine's seconds the facts say that nothing is on record.
    """
    first, *rest = records_of("quickstart", repeats=1)
    unknown = [changed(record, processor_use=None) for record in (first, *rest)]
    folders = {"taken": [taken_by_others(first, 0.5), *rest], "quiet": [first, *rest], "unknown": unknown}
    page = {}
    for name, records in folders.items():
        for record in records:
            write(tmp_path / name, record)
        text = _Page(build(tmp_path / name).read_text().replace("</dt>", ": </dt>")).text
        page[name] = " ".join(text.split())
    assert "During 1 of 5 trials other programs and the hypervisor together took more" in page["taken"]
    assert "more than 5% of the processors' time, at most 50%" in page["taken"]
    assert "processors taken by others: at most 50.0% in a trial" in page["taken"]
    assert f"{first.id} ‡" in page["taken"]
    assert f"{rest[0].id} ‡" not in page["taken"]
    assert not any(f"{record.id} ‡" in page["quiet"] for record in (first, *rest))
    assert "processors taken by others: at most 1.0% in a trial" in page["quiet"]
    assert "processors taken by others: not recorded" in page["unknown"]


@pytest.mark.usefixtures("undrawn")
def test_what_rows_share_stands_above_them_on_the_page(tmp_path: Path) -> None:
    """The Summary of several rates and batches is no wider on the page than that of one: each place stands
    once, over the whole width, above its rows; files keep it in columns.
    """
    rates, sizes = ("50 Mbit/s", "200 Mbit/s"), (256, 512)
    places = list(product(rates, sizes))
    for (rate, tokens), strategy in product(places, ("zero3", "zeropp")):
        fields = {"tokens_per_rank": tokens, "cluster": Cluster(rate=rate), "steps": 100, "validate_every": 0}
        write(tmp_path, record_of(Trial(strategy=strategy, **fields)))
    text = build(tmp_path).read_text()
    section = text.split('<section id="table-summary">')[1].split("</section>")[0]
    heads = re.findall(r"<th scope=\"col\"[^>]*>([^<]*)</th>", section)
    assert heads[0] == "Configuration"
    assert "Validation loss, mean" in heads
    groups = re.findall(r"<th scope=\"rowgroup\" colspan=\"(\d+)\">([^<]*)</th>", section)
    expected = sorted(f"{rate}, {size} tokens/rank" for rate, size in places)
    assert sorted(place for _, place in groups) == expected
    assert {int(columns) for columns, _ in groups} == {len(heads)}
    assert section.count("<tbody>") == len(places)
    assert "| Setting |" in (tmp_path / "tables" / "summary.md").read_text()


@pytest.mark.long
def test_the_same_records_give_the_same_bytes(quickstart: Path, tmp_path: Path) -> None:
    """A build of a copy elsewhere writes equal files."""
    copy = tmp_path / "elsewhere" / "copy"
    copy.mkdir(parents=True)
    for path in quickstart.glob("*.json"):
        shutil.copy(path, copy)
    build(copy)
    assert _snapshot(copy) == _snapshot(quickstart)


@pytest.mark.usefixtures("undrawn")
def test_a_figure_whose_data_went_away_is_removed(tmp_path: Path) -> None:
    """A second build without the records behind a figure leaves no stale file of it."""
    folder = _folder(tmp_path, "quickstart")
    build(folder)
    stale = folder / "figures" / "throughput.svg"
    stale.write_text("old")
    page = folder / "report.html"
    page.write_text(page.read_text().replace("</body>", '<a href="figures/throughput.svg">SVG</a></body>'))
    kept = folder / "figures" / "mine.svg"
    kept.write_text("mine")
    build(folder)
    assert not stale.exists()
    assert kept.exists()


def _snapshot(folder: Path) -> dict[Path, bytes | None]:
    """Every file with its bytes, every folder with None."""
    return {
        path.relative_to(folder): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")
    }


@pytest.mark.parametrize("size", [0, *nightly(250_000)])
def test_a_full_disk_leaves_the_previous_report(size: int, quickstart: Path, tmp_path: Path) -> None:
    """Whether the first figure or the page cannot be written, nothing of the folder changes."""
    folder = tmp_path / "results"
    shutil.copytree(quickstart, folder)
    (folder / "report.html").write_text("previous")
    before, limits = _snapshot(folder), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))  # files grow no further, as on a full disk
    try:
        with pytest.raises(ReportError, match="cannot write the report"):
            build(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert _snapshot(folder) == before


@pytest.mark.usefixtures("undrawn")
def test_an_interrupted_build_leaves_the_previous_report(quickstart: Path, tmp_path: Path) -> None:
    """Ctrl-C while the page is made leaves the folder as it was."""
    folder = tmp_path / "results"
    shutil.copytree(quickstart, folder)
    before = _snapshot(folder)
    with mock.patch("report.page.render", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        build(folder)
    assert _snapshot(folder) == before


@pytest.mark.usefixtures("undrawn")
def test_nothing_but_failures_still_gives_a_page(tmp_path: Path) -> None:
    """A sweep in which all trials failed has a page that says so."""
    write(tmp_path, record_of(Trial(), failure=Failure(kind="timeout", message="too slow", log=None)))
    text = _Page(build(tmp_path).read_text()).text
    assert "too slow" in text
    assert "0 finished, 1 failed" in text
    page = (tmp_path / "report.html").read_text()
    assert "<title>No finished trial of quickstart</title>" in page
    assert ">Figures<" not in page
    assert "No trial has finished: 1 failed." in text


@pytest.mark.usefixtures("undrawn")
def test_what_was_interrupted_did_not_fail(tmp_path: Path) -> None:
    """A trial that Ctrl-C ended is counted by itself until it is run again, and is no failed trial."""
    write(tmp_path, record_of(Trial(strategy="zero3")))
    failure = Failure(kind="interrupted", message="Ctrl-C", log=None)
    write(tmp_path, record_of(Trial(strategy="zeropp"), failure=failure))
    text = " ".join(_Page(build(tmp_path).read_text()).text.split())
    assert "1 finished, 0 failed, 1 interrupted, not yet run again" in text
    assert "Failed trials" not in text


def test_what_cannot_be_reported_raises_one_line(tmp_path: Path) -> None:
    """No records, a foreign file and another schema version each give one line and no page."""
    with pytest.raises(ReportError, match="no records; `zeropp run SUITE`") as empty:
        build(tmp_path)
    foreign = tmp_path / "x.json"
    foreign.write_text("{")
    with pytest.raises(RecordError, match=r"not a record: .*; delete the file and run again") as broken:
        build(tmp_path)
    foreign.write_text(json.dumps({"schema_version": 0}))
    with pytest.raises(RecordError, match="schema version 0") as old:
        build(tmp_path)
    for raised in (empty, broken, old):
        assert "\n" not in str(raised.value)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("link", ["none", "auto"])
def test_peers_and_unmeasured_links_are_reported(link: Literal["none", "auto"], tmp_path: Path) -> None:
    """A sweep of peers beside policies, with no rate known, has a page without a best step."""
    for name in ("single", "ddp", "fsdp2", "exact", "zero3", "zeropp"):
        record = record_of(Trial(strategy=name, cluster=Cluster(link=link), validate_every=0))
        write(tmp_path, changed(record, link=None) if link == "none" else record)
    page = _Page(build(tmp_path).read_text())
    for name in ("single process", "DDP", "FSDP2", "exact (fp32)", "ZeRO-3", "ZeRO++"):
        assert name in page.text
    assert any(alt.startswith("Speed-up. How much faster") for alt in page.all("img", "alt"))


@pytest.mark.usefixtures("undrawn")
def test_halved_ledgers_are_marked(tmp_path: Path) -> None:
    """The page says that halved ledgers, in a record without its digest, are neither the prediction nor the
    interfaces' bytes, and counts them out of the checks; with its digest the record is refused.
    """
    pairs = product(("zeropp", "zero3"), range(2))
    trials = [Trial(strategy=name, repeat=at, cluster=Cluster(rate="50 Mbit/s")) for name, at in pairs]
    bad = record_of(trials[1])
    for trial in trials:
        write(tmp_path, record_of(trial))
    (tmp_path / f"{bad.id}.json").write_text(halved(bad).model_dump_json())
    with pytest.raises(RecordError, match="edited or damaged since it was written"):
        build(tmp_path)
    for path in tmp_path.glob("*.json"):
        data = json.loads(path.read_text())
        del data["digest"]
        path.write_text(json.dumps(data))
    page = " ".join(_Page(build(tmp_path).read_text()).text.split())
    assert f"The ledger differs from the prediction in 1 trial: {bad.id}" in page
    assert f"The interfaces did not count the bytes that the ledger holds in 1 trial: {bad.id}" in page
    assert "4 of 4 records have no digest" in page
    checks = (tmp_path / "tables" / "checks.md").read_text()
    assert "1 of 2" in checks
    assert "2 of 2" in checks


@pytest.mark.usefixtures("undrawn")
def test_a_modelled_link_is_called_so(tmp_path: Path) -> None:
    """If a pacer stood for the link, title, headline, captions and places say "modelled"."""
    for name in ("zero3", "zeropp"):
        record = record_of(Trial(strategy=name, cluster=Cluster(rate="50 Mbit/s")))
        paced = record.link.model_copy(update={"kind": "paced"})
        write(tmp_path, changed(record, link=paced, interfaces=None))
    text = build(tmp_path).read_text()
    assert "modelled link</title>" in text
    page = " ".join(_Page(text).text.split())
    assert "ranks, modelled 50 Mbit/s" in page
    captions = text.count("<figcaption>") + text.count('<p class="caption footnotes">')
    assert captions > 5
    assert "Emulated: nodes are processes of one machine, and the link between them is modelled" in page
    assert page.count("Modelled: in all trials the link between nodes was a pacer") == captions + 1
    for path in (tmp_path / "tables").glob("*.md"):
        assert "Modelled" in path.read_text()


@pytest.mark.long
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("cores", [1, *nightly(2)])
def test_a_folder_of_archives_is_reported_whole(
    cores: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``zeropp report`` draws a page of each, in as many processes."""
    monkeypatch.setattr(machine, "cores", lambda: cores)
    for suite in ("rlhf", "stages"):
        shutil.copy(ROOT / REFERENCE / f"{suite}.tar.xz", tmp_path)
    assert cli.main(["report", str(tmp_path)]) == cli.OK
    pages = [Path(page) for page in capsys.readouterr().out.split()]
    assert pages == [tmp_path / suite / "report.html" for suite in ("rlhf", "stages")]
    assert all(page.stat().st_size > 1000 for page in pages)


@pytest.mark.long
@pytest.mark.usefixtures("undrawn")
def test_a_broken_archive_leaves_the_pages_of_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Paths of the pages are printed, then why the others have none, in one line each; the status is 2."""
    shutil.copy(ROOT / REFERENCE / "stages.tar.xz", tmp_path)
    for broken in ("a", "z"):
        (tmp_path / f"{broken}.tar.xz").write_bytes(b"no archive")
    assert cli.main(["report", str(tmp_path)]) == REFUSED
    printed = capsys.readouterr()
    assert printed.out == f"{tmp_path / 'stages' / 'report.html'}\n"
    first, second = printed.err.splitlines()
    assert first.startswith(f"zeropp: {tmp_path / 'a.tar.xz'}: cannot be unpacked: ")
    assert second.startswith(f"zeropp: {tmp_path / 'z.tar.xz'}: cannot be unpacked: ")


@pytest.mark.usefixtures("undrawn")
def test_a_run_builds_a_page_of_the_same_records_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time it prints the path and the lead alone; another record, or no page, builds it again."""
    built = mock.Mock(side_effect=build)
    monkeypatch.setattr("report.build.build", built)
    folder = _folder(tmp_path, "quickstart")

    def printed() -> tuple[str, str]:
        report_after_run(folder)
        return tuple(capsys.readouterr())  # type: ignore[return-value]

    path, lead = printed()
    assert path == f"{folder / 'report.html'}\n"
    assert "ZeRO++ is 3.56x faster than ZeRO-3" in lead
    assert printed() == (path, lead)
    assert built.call_count == 1
    (folder / "report.html").unlink()
    assert printed() == (path, lead)
    assert built.call_count == 2
    next(folder.glob("*.json")).unlink()
    printed()
    assert built.call_count == 3
    build(folder, width=84.0)  # another page than a run's
    printed()
    assert built.call_count == 4


@pytest.mark.parametrize(
    ("name", "says"),
    [("figures", "this is no folder"), ("tables", "this is no folder"), ("report.html", "this is a folder")],
)
def test_what_stands_in_the_reports_place_is_named(tmp_path: Path, name: str, says: str) -> None:
    """It is refused before anything is drawn, and nothing of the report is written."""
    folder = _folder(tmp_path / "q", "quickstart")
    if name == "figures":
        (folder / name).symlink_to("nowhere")
    elif name == "tables":
        (folder / name).touch()
    else:
        (folder / name).mkdir()
    before = sorted(folder.iterdir())
    with pytest.raises(ReportError, match=rf"q/{name}: {says}, .*; move it away"):
        build(folder)
    assert sorted(folder.iterdir()) == before


def test_ctrl_c_ends_the_pages_of_all_archives(tmp_path: Path) -> None:
    """The processes that build pages of archives end with the command, and one line says so."""
    for name in ("quickstart", "ladder"):
        shutil.copy(REFERENCE / f"{name}.tar.xz", tmp_path)
    command = [sys.executable, "-m", "harness.cli", "report", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        # One process tracks resources, and the others build pages.
        until(lambda: len(psutil.Process(process.pid).children()) > 2, seconds=60)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=20)  # the children have standard error, too
    assert (process.returncode, error) == (130, "zeropp: interrupted\n")
    assert not list(tmp_path.rglob("report.html"))
