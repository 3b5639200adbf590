"""Sentences of pages on emulated links."""

from __future__ import annotations

from harness.suites.trial import Cluster, Trial
from report.data import caveats
from report.data.frames import frames_of
from report.data.metrics import derive
from tests.report.bench.bench_records import codecs, collectives, overlap
from tests.report.records import on_link, record_of


def test_the_sentence_names_what_is_emulated_and_its_latency() -> None:
    """Namespaces, shared processors, and the latency or that there is none."""
    frames = frames_of([record_of(Trial(cluster=Cluster.model_validate({"rate": "50 Mbit/s"})))])
    sentence = caveats.emulated_by_trials(frames)
    assert "network namespaces of one machine" in sentence
    assert "share the processors of one machine" in sentence
    assert "adds no latency" in sentence
    late = Trial(cluster=Cluster.model_validate({"rate": "50 Mbit/s", "latency": "2 ms"}))
    assert "adds 2 ms of latency one way" in caveats.emulated_by_trials(frames_of([record_of(late)]))


def test_a_real_network_and_one_node_have_no_sentence() -> None:
    """They emulate nothing between nodes."""
    assert not caveats.emulated(["real", ""], [None])
    of_one_node = record_of(Trial(cluster=Cluster(nodes=1, ranks_per_node=2)))
    assert not caveats.emulated_by_trials(frames_of([of_one_node]))
    assert not caveats.beside_real(["real"])
    # Shaped interfaces are of a real network, and their sentence follows that of emulated links.
    assert caveats.emulated(["shaped"], [None]).startswith("Throttled: nodes are hosts")
    assert not caveats.beside_real(["shaped"])
    both = caveats.emulated(["paced", "shaped"], [None])
    assert both.startswith("Emulated")
    assert "Throttled" in both


def test_benchmarks_with_and_without_a_rate_are_told_apart() -> None:
    """A link with a rate is of namespaces; without one is not limited to a rate it; one node has none."""
    shaped = overlap()
    bare = [s.model_copy(update={"names": s.names | {"rate_mbit": None}}) for s in shaped.samples]
    assert "namespaces" in caveats.emulated_by_benches([shaped])
    assert "is not limited to a rate" in caveats.emulated_by_benches(
        [shaped.model_copy(update={"samples": bare})]
    )
    assert not caveats.emulated_by_benches([collectives(), codecs()])


def test_a_warning_names_six_trials_and_counts_the_others() -> None:
    """Of eight trials over a link at half the requested rate, six are named and two are counted."""
    cluster = Cluster.model_validate({"rate": "100 Mbit/s"})
    records = [on_link(record_of(Trial(cluster=cluster, repeat=repeat)), 50) for repeat in range(8)]
    (warning,) = [text for text in caveats.warnings(derive(frames_of(records))) if "requested rate" in text]
    named = ", ".join(sorted(record.id for record in records)[:6])
    assert f" in 8 trials: {named} and 2 more. For example, trial " in warning
    (few,) = [text for text in caveats.warnings(derive(frames_of(records[:6]))) if "requested rate" in text]
    assert f" in 6 trials: {', '.join(sorted(r.id for r in records[:6])[:5])} and " in few
    assert "more. For" not in few
