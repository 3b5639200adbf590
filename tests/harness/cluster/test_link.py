"""Links between nodes: their parameters, refusals, rates and counters."""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.cluster.link import OPENING, Link, message_bytes, open_link, slowest_rates
from harness.cluster.nccl_environment import choose_hcas, flight_recorder, nccl_in_words, nccl_variables
from harness.cluster.port import Port
from harness.cluster.rank import lift_rate
from harness.cluster.rank_processes import Launch, LaunchError, run_ranks
from harness.errors import LinkError
from harness.records.packet_sizes import HEADER_BYTES
from harness.shaping import keeper, netns_shaper
from harness.shaping.netns_shaper import shape
from harness.shaping.pacer import Pacer
from harness.suites.parse_quantity import CANONICAL
from harness.suites.trial import Cluster
from impl.policy.topology import Topology
from tests.harness.cluster import targets
from tests.harness.cluster.test_rank_processes import until
from tests.support.params import long

ROOT = Path(__file__).resolve().parents[3]


def cluster_with(link: str, nodes: int, rate: float | None = None, **changes: object) -> Cluster:
    """Return a cluster with such a link; rates are in Mbit/s."""
    fields = {"link": link, "nodes": nodes, "rate": rate, **changes}
    return Cluster.model_validate(fields, context=CANONICAL)


def launch_of(joined: Link, tmp_path: Path, per_node: int = 1) -> Launch:
    topology = Topology(joined.cluster.nodes, per_node)
    return Launch(topology, joined.ports, joined.paced_mbit, 1, 120, tmp_path / "log")


def exchanged(
    joined: Link, tmp_path: Path, nbytes: int, repetitions: int, per_node: int = 1
) -> list[tuple[list[float], int, int]]:
    return run_ranks(targets.exchanged, (nbytes, repetitions), launch_of(joined, tmp_path, per_node))


# Pure parts


@given(rate=st.floats(0.05, 30_000), latency=st.floats(0, 100))
def test_queues_suit_their_rate(rate: float, latency: float) -> None:
    """A packet fits into the burst, the queue holds 0.4 s, and a calibration message takes at least 20 bursts, 49
    latencies and 0.19 s.
    """
    queue = shape(rate)
    assert 2 * netns_shaper.MTU <= queue.segment <= 65536
    assert queue.segment + HEADER_BYTES <= queue.burst < queue.limit
    assert queue.limit - queue.burst == pytest.approx(0.4 * queue.rate, abs=1)
    nbytes = message_bytes(cluster_with("namespaces", 2, rate, latency=latency))
    assert nbytes >= 20 * queue.burst
    assert nbytes >= max(0.19, 0.049 * latency) * queue.rate


def test_a_nodes_rate_is_that_of_all_its_adapters() -> None:
    """Rates of ranks that send at once add up, as far as the last message allows; ranks that wait do not count."""
    two_rails = [[10.0, 10.0], [8.0, 12.0], [9.0, 9.0], [9.0, 11.0]]
    assert slowest_rates(two_rails, 2) == [16.0, 18.0]
    first_ranks = [[10.0, 30.0], [], [20.0, 20.0], []]
    assert slowest_rates(first_ranks, 2) == [10.0, 20.0]
    assert slowest_rates([[]], 1) == []


def test_all_ranks_share_the_message_of_a_link_with_a_rate() -> None:
    """With NCCL, a node's ranks send a calibration message of the same length in time as one rank otherwise."""
    gpus = {"device": "cuda", "transport": "nccl", "ranks_per_node": 8}
    whole = message_bytes(cluster_with("shaped", 2, 1000.0, ranks_per_node=8))
    assert message_bytes(cluster_with("shaped", 2, 1000.0, **gpus)) == pytest.approx(whole / 8, abs=1)
    assert message_bytes(cluster_with("real", 2, None, **gpus)) == 64 * 2**20


def test_every_rank_of_a_node_measures_its_own_adapter(tmp_path: Path) -> None:
    """Together, all ranks exchange messages with the next node, each with its own rank there; else the first do."""
    with open_link(cluster_with("none", 3), "abc123") as joined:
        launch = launch_of(joined, tmp_path, 2)
        together = run_ranks(targets.exchanged_together, (1000, 2), launch)
        alone = exchanged(joined, tmp_path, 1000, 2, 2)
    assert [len(rates) for rates in together] == [2] * 6
    assert [len(rates) for rates, _, _ in alone] == [2, 0] * 3


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=30), st.floats(0.1, 1e4))
def test_a_pacer_serves_one_message_after_the_other(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], rate: float
) -> None:
    """Bookings of a node end in order, each after at least the time that its bytes take; nodes do not wait for each
    other.
    """
    path = Pacer.create(tmp_path_factory.mktemp("pacer") / "file", 2)
    pacer, again, other = Pacer(path, 0, rate), Pacer(path, 0, rate), Pacer(path, 1, rate)
    end = time.monotonic()
    for number, size in enumerate(sizes):
        booked = (pacer, again)[number % 2].book(size)
        assert booked >= end + 8 * size / (rate * 1e6) * (1 - 1e-6) - 1e-6
        end = booked
    before = time.monotonic()
    assert before <= other.book(0) <= time.monotonic()
    for handle in (pacer, again, other):
        handle.close()


@pytest.mark.parametrize(
    ("cluster", "kind"),
    [
        (cluster_with("auto", 1, 50.0), "none"),
        (cluster_with("namespaces", 1), "none"),
        (cluster_with("none", 3), "none"),
        (cluster_with("paced", 2, 50.0), "paced"),
        (cluster_with("paced", 2), "none"),
        (cluster_with("real", 2), "real"),
    ],
)
def test_links_without_namespaces(cluster: Cluster, kind: str) -> None:
    """One node has no link; links ``paced``, ``none`` and ``real`` need nothing from the kernel."""
    with open_link(cluster, "abc123") as joined:
        assert joined.kind == kind
        assert joined.paced_mbit == (50.0 if kind == "paced" else None)
        assert len(joined.ports) == cluster.nodes
        assert all(port.holder is None for port in joined.ports)


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (cluster_with("none", 2, 50.0), "link 'none' cannot have a rate of 50 Mbit/s"),
        (cluster_with("real", 2, 50.0), "link 'real' cannot have a rate of 50 Mbit/s"),
        (cluster_with("real", 2, None, latency=2.0), "link 'real' cannot have a latency of 2 ms"),
        (
            cluster_with("real", 2, 50.0, launcher="torchrun"),
            "set cluster.link to 'paced' or, for nodes on distinct hosts, 'shaped'",
        ),
        (
            cluster_with("real", 2, 50.0, latency=2.0, launcher="torchrun"),
            "set cluster.link to 'paced', with a rate",
        ),
        (
            cluster_with("paced", 2, None, latency=2.0),
            "cluster.latency = '2 ms' without cluster.rate needs network namespaces",
        ),
        (cluster_with("paced", 3, 50.0, slow=0.5), r"cluster.slow = 0\.5 needs network namespaces"),
        (
            cluster_with("paced", 2, 50.0, inner_rate=40.0),
            "cluster.inner_rate = '40 Mbit/s' needs network namespaces",
        ),
    ],
)
def test_what_a_link_cannot_have_is_refused(cluster: Cluster, message: str) -> None:
    """A link that cannot have the requested rate or latency is refused, and the message names it."""
    with pytest.raises(LinkError, match=message):
        open_link(cluster, "abc123")


@given(
    rates=st.lists(st.floats(1, 200), min_size=1, max_size=5),
    kind=st.sampled_from(["shaped", "namespaces", "paced"]),
)
def test_what_is_called_shaped_has_the_rate(rates: list[float], kind: str) -> None:
    """A shaped link whose median calibration is below 0.9 or above 1.05 of its rate is refused with both numbers."""
    joined = Link(cluster_with(kind, 2, 100.0), kind, "", (Port(None, ""),) * 2, calibrated_mbit=rates)
    median = statistics.median(rates)
    why = "carries no more" if median < 100 else "bypass the queue"
    refusal = pytest.raises(LinkError, match=rf"set to 100 Mbit/s but carries {median:.4g} Mbit/s: .*{why}")
    with contextlib.nullcontext() if kind != "shaped" or 90 <= median <= 105 else refusal:
        joined.check()


def test_nccls_latest_calls_are_recorded_and_written_at_a_time_out() -> None:
    """Torch's flight recorder is on, and writes beside the trial's log."""
    recorder = flight_recorder("logs/trial.log.nccl")
    assert int(recorder["TORCH_FR_BUFFER_SIZE"]) > 0
    assert recorder["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert recorder["TORCH_FR_DUMP_TEMP_FILE"] == "logs/trial.log.nccl"


def test_nccl_sends_through_what_was_asked_for() -> None:
    """NCCL's variables name the shaped interface or the adapters; their text is given once if all nodes have the
    same.
    """
    assert nccl_variables(Port("eth0", "10.0.0.1")) == {}
    inside = nccl_variables(Port("zp0", "10.0.0.1", holder=1))
    assert inside["NCCL_SOCKET_IFNAME"] == "=zp0"
    assert inside["NCCL_IB_DISABLE"] == inside["NCCL_P2P_DISABLE"] == inside["NCCL_SHM_DISABLE"] == "1"
    shaped = nccl_variables(Port("eth0", "10.0.0.1", shaped_mbit=50.0))
    assert shaped == {
        "NCCL_SOCKET_IFNAME": "=eth0", "NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket", "NCCL_MNNVL_ENABLE": "0",
    }  # fmt: skip
    adapters = nccl_variables(Port("eth0", "10.0.0.1", hcas="mlx5_0,mlx5_2"))
    assert adapters == {
        "NCCL_IB_HCA": "=mlx5_0,mlx5_2", "NCCL_IB_DISABLE": "0", "NCCL_NET": "IB", "NCCL_MNNVL_ENABLE": "0",
    }  # fmt: skip
    same, other = (Port(name, "", shaped_mbit=50.0) for name in ("eth0", "ens3"))
    assert nccl_in_words([same, same]).count("NCCL_SOCKET_IFNAME==eth0") == 1
    assert re.search("node 0: .*=eth0.*; node 1: .*=ens3", nccl_in_words([same, other]))


@given(present=st.lists(st.sampled_from([f"mlx5_{n}" for n in range(12)]), unique=True), data=st.data())
def test_adapters_are_those_that_a_node_has(present: list[str], data: st.DataObject) -> None:
    """A number chooses the first adapters; a missing one is refused, with the names of those present."""
    number = data.draw(st.integers(1, 12))
    names = tuple(data.draw(st.lists(st.sampled_from([*present, "hfi1_0"]), min_size=1, unique=True)))
    for requested, text, chosen in (
        (number, number, present[:number] if number <= len(present) else None),
        (names, ", ".join(names), list(names) if set(names) <= set(present) else None),
    ):
        if chosen is not None:
            assert choose_hcas(requested, present, 3).split(",") == chosen
        else:
            with pytest.raises(
                LinkError, match=f"cluster.hcas = {text}: node 3 has these .* port: "
            ) as caught:
                choose_hcas(requested, present, 3)
            assert f"port: {', '.join(present) or 'none'}; name adapters" in str(caught.value)


ROUND_TRIP = """
import socket, sys, time
from harness.shaping import netns_shaper
netns_shaper.enter(int(sys.argv[1]))
begun = time.monotonic()
assert socket.socket().connect_ex((sys.argv[2], 9))  # nobody listens, and the other side refuses
print(time.monotonic() - begun)
"""


@pytest.mark.needs("namespaces")
def test_a_latency_of_namespaces_is_added_or_refused() -> None:
    """If the kernel has netem, a round trip takes twice the latency; otherwise the refusal says that netem is
    missing.
    """
    try:
        joined = open_link(cluster_with("namespaces", 2, 50.0, latency=20.0), "late02")
    except LinkError as error:
        assert "a latency of 20 ms needs netem, which the kernel lacks" in str(error)  # noqa: PT017
        return
    with joined:
        assert joined.details["latency_ms"] == 20.0
        command = [sys.executable, "-c", ROUND_TRIP, str(joined.ports[0].holder), joined.ports[1].address]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert float(done.stdout) >= 0.04


def test_a_keeper_that_is_late_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the limit of the wait, and does not claim that the keeper has died."""
    monkeypatch.setattr(keeper, "ANSWER_SECONDS", 0.01)
    with pytest.raises(LinkError, match=r"did not answer within 0\.01 s"):
        open_link(cluster_with("namespaces", 2), "late01")


def test_impossible_namespaces_say_why() -> None:
    """Link ``namespaces`` is refused with the keeper's reason and advice; link ``auto`` becomes paced and keeps the
    reason.
    """
    name, why = "a-name-that-is-too-long", "no network namespaces here: .*; run as root"
    with pytest.raises(LinkError, match=why):
        open_link(cluster_with("namespaces", 2, 50.0), name)
    for rate, kind in ((50.0, "paced"), (None, "none")):
        with open_link(cluster_with("auto", 2, rate), name) as joined:
            assert joined.kind == kind
            assert re.search(why, joined.why)


def test_joining_a_process_that_is_gone_is_refused() -> None:
    """Entering the namespaces of a process that has ended raises a LinkError."""
    with pytest.raises(LinkError, match="4194304"):
        netns_shaper.enter(4194304)


def test_a_paced_exchange_achieves_its_rate(tmp_path: Path) -> None:
    """Messages through the pacer run at the rate, and not faster."""
    with open_link(cluster_with("paced", 2, 40.0), "abc123") as joined:
        ranks = exchanged(joined, tmp_path, 500_000, 2)
    for rates, _, _ in ranks:
        assert all(5 < rate <= 40.1 for rate in rates)


# With the kernel


@pytest.mark.needs("namespaces")
@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (3, 1)])
def test_namespaces_shape_and_count(tmp_path: Path, nodes: int, per_node: int) -> None:
    """Each node sends at the rate and not faster; its interface counts the messages plus 66 bytes per packet."""
    cluster = cluster_with("namespaces", nodes, 50.0)
    nbytes, repetitions = message_bytes(cluster_with("namespaces", 2, 50.0)), 3
    with open_link(cluster, "abc123") as joined:
        assert joined.kind == "namespaces"
        ranks = exchanged(joined, tmp_path, nbytes, repetitions, per_node)
    sent = repetitions * nbytes + nbytes // OPENING
    for rates, tx_bytes, tx_packets in ranks[::per_node]:
        assert all(5 < rate < 52 for rate in rates)
        assert (tx_bytes - HEADER_BYTES * tx_packets) / sent == pytest.approx(1, abs=0.005)


@pytest.mark.needs("namespaces")
def test_a_slow_node_sends_and_receives_at_its_share_of_the_rate(tmp_path: Path) -> None:
    """In a ring of three nodes, messages to and from the last node are slow, also after the link was open."""
    cluster = cluster_with("namespaces", 3, 50.0, slow=0.5)
    with open_link(cluster, "abc123") as joined:
        with lift_rate(joined.ports[0].control):
            pass
        ranks = exchanged(joined, tmp_path, message_bytes(cluster), 2, 1)
    from_the_node_before = [statistics.median(rates) for rates, _, _ in ranks]
    assert from_the_node_before == pytest.approx([25.0, 50.0, 25.0], rel=0.15)


@pytest.mark.needs("namespaces")
def test_ranks_of_a_node_share_its_inner_rate(tmp_path: Path) -> None:
    """Both directions together run at the inner rate, also after the link was open; the rate between nodes is
    separate.
    """
    cluster = cluster_with("namespaces", 2, 100.0, inner_rate=40.0)
    with open_link(cluster, "abc123") as joined:
        assert joined.details["inner_mbit"] == 40
        with lift_rate(joined.ports[0].control):
            pass
        inside = run_ranks(targets.exchanged_inside, 2_000_000, launch_of(joined, tmp_path, 2))
        between = exchanged(joined, tmp_path, message_bytes(cluster), 2, 2)
    slower = [min(inside[:2]), min(inside[2:])]  # a rank may have its share of both directions first
    assert slower == pytest.approx([40, 40], rel=0.15)
    assert [statistics.median(rates) for rates, _, _ in between[::2]] == pytest.approx([100, 100], rel=0.15)


@pytest.mark.needs("namespaces")
@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), *long((3, 1))])
def test_a_link_is_opened_and_shaped_again(tmp_path: Path, nodes: int, per_node: int) -> None:
    """While the link is open, no queue has the rate; afterwards all have it, no bytes wait, and messages run at the
    rate.
    """
    cluster = cluster_with("namespaces", nodes, 50.0)
    with open_link(cluster, "abc123") as joined:
        assert joined.details["untimed"] == "open"
        folder = Path(joined.ports[0].control).parent
        assert folder.is_dir()
        ranks = run_ranks(targets.opened, message_bytes(cluster), launch_of(joined, tmp_path, per_node))
    shaped = shape(50.0).rate
    for number, (queues, rates, waiting) in enumerate(ranks):
        assert queues == [shaped, netns_shaper._OPEN_RATE, shaped] * 2
        assert len(rates) == (2 if number % per_node == 0 else 0)
        assert all(5 < rate < 52 for rate in rates)
        assert waiting < 1500  # at most a barrier's
    assert not folder.exists()


@pytest.mark.needs("namespaces")
@pytest.mark.parametrize("how", ["raise", "kill"])
def test_a_failure_leaves_no_link_open(tmp_path: Path, how: str) -> None:
    """After a rank has failed while the link was open, the rank that opened it or another, the link is shaped again."""
    with open_link(cluster_with("namespaces", 2, 50.0), "abc123") as joined:
        launch = launch_of(joined, tmp_path)
        with pytest.raises(LaunchError, match="planted error" if how == "raise" else "SIGKILL"):
            run_ranks(targets.fail_while_open, how, launch)
        for queues, rates, _ in run_ranks(targets.opened, message_bytes(joined.cluster), launch):
            assert queues[0] == shape(50.0).rate
            assert all(5 < rate < 52 for rate in rates)


def test_a_keeper_that_is_gone_opens_nothing(tmp_path: Path) -> None:
    """Lifting the rate raises a LinkError with the kernel's reason."""
    with pytest.raises(LinkError, match=r"does not answer: .*No such file"), lift_rate(f"{tmp_path}/none"):
        pass


def test_a_paced_link_adds_its_latency_and_is_opened_too(tmp_path: Path) -> None:
    """A booking ends later by the latency, which delays no later booking; an open pacer books without a rate."""
    pacer = Pacer(Pacer.create(tmp_path / "pacer", 1), 0, 8.0, latency_ms=1e4)
    begun = time.monotonic()
    first, second = pacer.book(1_000_000), pacer.book(1_000_000)  # a second each
    assert second - first == pytest.approx(1.0)
    assert begun + 11 <= first <= time.monotonic() + 11
    pacer.open = True
    assert begun + 10 <= pacer.book(1_000_000) <= time.monotonic() + 10
    pacer.open = False
    assert pacer.book(0) == pytest.approx(second)
    pacer.close()


@pytest.mark.needs("namespaces")
def test_two_links_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Links of two runs exist at the same time, even with one id; closing one removes its processes and namespaces
    and leaves the other.  Nothing is created in the host's own namespace.
    """
    before = Path("/proc/self/net/dev").read_text().count("\n")
    first = open_link(cluster_with("namespaces", 3, 50.0), "abc123")
    holders = [port.holder for port in first.ports]
    assert all(Path(f"/proc/{holder}").exists() for holder in holders)
    with open_link(cluster_with("namespaces", 2, 80.0), "abc123") as second:
        assert Path("/proc/self/net/dev").read_text().count("\n") == before
        first.close()
        ranks = exchanged(second, tmp_path, message_bytes(second.cluster), 1)
        assert all(rates[0] < 83 for rates, _, _ in ranks)
    wait_until_ended(holders)


@pytest.mark.needs("namespaces")
def test_a_killed_parent_leaves_no_namespace(tmp_path: Path) -> None:
    """After ``kill -9`` of the process that opened a link, its keeper and the holders of its namespaces end."""
    code = (
        "import time; from tests.harness.cluster.test_link import cluster_with, open_link\n"
        "joined = open_link(cluster_with('namespaces', 2, 50.0), 'abc123')\n"
        "print(*(port.holder for port in joined.ports), flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        holders = [int(word) for word in parent.stdout.readline().split()]
        assert len(holders) == 2
        parent.kill()
    wait_until_ended(holders)


@pytest.mark.needs("namespaces", "root", "setpriv")
@pytest.mark.long
def test_rootless_namespaces_work_like_roots(tmp_path: Path) -> None:
    """Without CAP_SYS_ADMIN the nodes are inside a user namespace; ranks enter them, and the link has its rate."""
    code = f"""
from pathlib import Path
from harness.cluster.link import *
from tests.harness.cluster.test_link import cluster_with, exchanged
if __name__ == "__main__":
    with open_link(cluster_with("namespaces", 2, 50.0), "abc123") as joined:
        print(joined.details["mode"])
        nbytes = message_bytes(joined.cluster)
        for rates, sent, packets in exchanged(joined, Path({str(tmp_path)!r}), nbytes, 2):
            print(min(rates), max(rates))
"""
    (tmp_path / "main.py").write_text(code)
    done = subprocess.run(
        ["setpriv", "--bounding-set=-sys_admin", sys.executable, tmp_path / "main.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    first, *rates = done.stdout.splitlines()
    assert first == "rootless", done.stderr
    assert all(5 < float(rate) < 52 for line in rates for rate in line.split())
    assert len(rates) == 2


def wait_until_ended(processes: list[int | None] | list[int]) -> None:
    until(lambda: not any(Path(f"/proc/{process}").exists() for process in processes))
