"""Says in one sentence what a link between the nodes of one machine can and cannot show."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from harness.records.bench_record import Bench
from report.data.frames import Frames

_NODES = {
    "open": "nodes are network namespaces of one machine, and nothing holds the link between them to a rate",
    "namespaces": "nodes are network namespaces of one machine, joined by a link that the kernel shapes",
    "paced": "nodes are processes of one machine, and the link between them is modelled: messages wait as "
    "long as their bytes would take",
    "none": "nodes are processes of one machine, and nothing holds the link between them to a rate",
}
_SHAPED = "Throttled: nodes are hosts, and the kernel held what left their own interfaces to the rate."


def sentence(kinds: Iterable[str], latencies_ms: Iterable[float | None]) -> str:
    """What was emulated, with latencies asked for, one way, in words; empty where the network is real."""
    told = [words for kind, words in _NODES.items() if kind in set(kinds)]
    throttled = [_SHAPED] if "shaped" in set(kinds) else []
    if not told:
        return "".join(throttled)
    added = " or ".join(f"{latency:g}" for latency in sorted({latency or 0.0 for latency in latencies_ms}))
    latency = "no latency" if added == "0" else f"{added} ms of latency one way"
    emulated = (
        f"Emulated: {'; or '.join(told)}. All ranks share one machine's processors, so that bytes cost "
        f"processor time beside the link's, a hop inside a node is a copy in its memory, and the link adds "
        f"{latency}."
    )
    return " ".join([emulated, *throttled])


def of_trials(frames: Frames) -> str:
    """The sentence for trials' records; one node has no link."""
    ended = pd.concat([frames.trials, frames.generators])
    joined = ended[ended["nodes"] > 1]
    latencies = [frames.ran[identity].cluster.latency for identity in joined["id"]]
    held = joined["rate_mbit"].notna() | joined["link_kind"].ne("namespaces")
    return sentence(joined["link_kind"].where(held, "open"), latencies)


def of_benches(benches: Iterable[Bench]) -> str:
    """The sentence for benchmarks' samples, whose links are namespaces where they have a rate."""
    places = {sample.place for bench in benches for sample in bench.samples}
    rates = [rate for nodes, _, rate in places if (nodes or 1) > 1]
    return sentence({"none" if rate is None else "namespaces" for rate in rates}, [None])


def note(kinds: Iterable[str]) -> str:
    """Caption text beside numbers of real networks; empty if ours is real too."""
    return "Ours are of emulated nodes: see the head of the page." if {*kinds} & {*_NODES} else ""
