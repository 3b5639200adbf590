"""The setting of all trials, on the page before the environment and in the headline."""

from __future__ import annotations

from pathlib import Path

from harness.records.trial_record import write
from harness.suites.trial import Cluster, Model, Optimizer, Trial
from report.build import build
from report.data.caveats import warnings
from report.data.frames import frames_of
from report.data.metrics import derive
from report.tables.provenance import essentials, settings
from tests.report.records import changed, record_of

SHA = "4cdcd8e30e688a37"
TRIAL = Trial(
    strategy="zeropp",
    cluster=Cluster(rate="50 Mbit/s"),
    model=Model(name="gpt-tiny", arguments={"width": 64}),
    corpus="books",
    sequence=64,
    tokens_per_rank=256,
    accumulation=2,
    steps=6,
    warmup=1,
    optimizer=Optimizer(name="SGD", arguments={"lr": 0.1}),
    clip=1.0,
)
RAN = {"kernels": "reference", "corpus_sha256": SHA}


def test_every_setting_is_told_from_the_records() -> None:
    """Model, sizes, steps, optimizer, seeds, repeats, corpus, link and kernels stand with their values."""
    trials = [TRIAL.model_copy(update={"repeat": repeat}) for repeat in range(3)]
    records = [record_of(trial, ran=RAN) for trial in trials]
    derived = derive(frames_of(records))
    values = dict(settings(derived.frames, derived.trials))
    assert values["seed"] == "0"
    expected = {
        "model.name": "gpt-tiny", "model.arguments.width": "64", "cluster.nodes": "2",
        "cluster.rate": "50 Mbit/s", "link": "namespaces", "sequence": "64", "tokens_per_rank": "256",
        "accumulation": "2", "steps": "6", "warmup": "1", "optimizer.name": "SGD",
        "optimizer.arguments.lr": "0.1", "clip": "1", "corpus": "books", "corpus, SHA-256": SHA,
        "kernels": "reference", "parameters": str(records[0].parameters), "units": "5", "repeats": "3",
    }  # fmt: skip
    assert {name: values.get(name) for name in expected} == expected
    assert not [name for name in values if name.startswith(("policy", "strategy"))]
    values = dict(essentials(derived.frames, derived.trials))
    assert values["parameters"] == f"{records[0].parameters / 1e6:.2f} M"
    assert values["tokens per rank"] == "256, in sequences of 64"
    assert values["repetition"] == "1 seed, 3 repeats"


def test_kernels_are_told_by_configuration_where_they_differ() -> None:
    """One backend is named alone; two, of two kinds of device, with the configurations on each."""
    for kernels, text in (("reference", "reference"), ("cuda", "reference (ZeRO-3); cuda (ZeRO++)")):
        other = record_of(Trial(strategy="zeropp"), ran={"kernels": kernels, "device": kernels})
        derived = derive(frames_of([record_of(Trial(strategy="zero3"), ran=RAN), other]))
        assert dict(settings(derived.frames, derived.trials))["kernels"] == text


def test_the_page_asks_the_question_and_tells_the_setting_before_the_environment(tmp_path: Path) -> None:
    """Question where records hold it, essentials before the contents, the table before the environment."""
    write(tmp_path, record_of(TRIAL, ran=RAN, question="How fast?"))
    page = build(tmp_path).read_text()
    head, rest = page.split("<nav")
    assert "How fast?" in head.split("</header>")[0]
    for text in ("gpt-tiny (width=64)", "3.25 M", "SGD (lr=0.1)", "books"):
        assert text in head
    assert 0 < rest.index('id="setting"') < rest.index('id="environment"')
    assert SHA in (tmp_path / "tables" / "setting.csv").read_text()


def test_a_corpus_that_changed_between_trials_is_warned_of() -> None:
    """Two contents of one corpus in a setting stand among the warnings; one does not."""
    first, same, other = (
        record_of(Trial(strategy=name), ran={"corpus_sha256": sha})
        for name, sha in (("zero3", "aa"), ("zeropp", "aa"), ("zeropp", "bb"))
    )
    warned = "Corpus stdlib changed between trials"
    assert warned in "".join(warnings(derive(frames_of([first, other]))))
    assert warned not in "".join(warnings(derive(frames_of([first, same]))))


def test_kernels_that_are_missing_are_told_first() -> None:
    """A record that says why the reference did the kernels' work is the first warning, counted; others say
    nothing.
    """
    slowly = {"kernels": "reference", "kernels_warning": "no C++ kernels: no C++ compiler installed"}
    records = [record_of(Trial(strategy=name), ran=slowly) for name in ("zero3", "zeropp")]
    records[1] = changed(records[1], predicted=records[1].predicted.model_copy(update={"equal": False}))
    sentences = warnings(derive(frames_of(records)))
    assert sentences[0].startswith("no C++ kernels: no C++ compiler installed; ")
    assert "2 trials" in sentences[0]
    assert len(sentences) > 1
    assert not any("kernels" in text for text in warnings(derive(frames_of([record_of(Trial())]))))
