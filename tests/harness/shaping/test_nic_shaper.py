"""The rate of a host's interface is limited, and afterwards the interface is as before; hosts are network namespaces
here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.shaping.netns_shaper import HEADER_BYTES, shape
from tests.harness.cluster.test_rank_processes import until
from tests.support.hosts import ROOT, Host, hosts
from tests.support.params import long

# A supervisor that waits for a line, and kills its keeper if the line is empty.
_HOLD = """
import json, os, signal, sys
from harness.shaping import keeper, nic_shaper
started, start = [], keeper.Keeper.__init__
keeper.Keeper.__init__ = lambda self, *request: start(self, *request) or started.append(self.process.pid)
try:
    with nic_shaper.shaped_interface(*json.loads(sys.argv[1])) as interface:
        print(started[0], json.dumps(interface), flush=True)
        if not input():
            os.kill(started[0], signal.SIGKILL)
except Exception as error:
    print(error)
"""
_KEEPER = [sys.executable, "-m", "harness.shaping.nic_shaper"]


@pytest.fixture
def host_pair(tmp_path: Path) -> Iterator[list[Host]]:
    """Yield two hosts."""
    with hosts(2, tmp_path, {}) as both:
        yield both


def towards(host_pair: list[Host], **changes: object) -> str:
    """Return the request to the first host's keeper, for messages to the second host."""
    request = {"interface": host_pair[0].interface, "rate_mbit": 50.0, "others": [host_pair[1].address]}
    return json.dumps([*(request | changes).values()])


def answer_of(host_pair: list[Host], wrapper: tuple[str, ...] = (), **changes: object) -> dict[str, str]:
    """Return the answer of a keeper on the first host, started through the command ``wrapper``; the keeper ends at
    once.
    """
    command = [*host_pair[0].inside, *wrapper, *_KEEPER, towards(host_pair, **changes)]
    done = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    answer: dict[str, str] = json.loads(done.stdout)
    return answer


@pytest.mark.parametrize("end", ["killed", *long("closed", "interrupted", "keeper told to end")])
def test_an_interface_is_shaped_while_its_supervisor_lives(host_pair: list[Host], end: str) -> None:
    """The interface has the same queue as namespaces, until its supervisor closes it, is interrupted or is killed."""
    before = host_pair[0].queues()
    command = [*host_pair[0].inside, sys.executable, "-c", _HOLD, towards(host_pair)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as holds:
        keeper, _, answer = holds.stdout.readline().partition(" ")
        expected = {"interface": host_pair[0].interface, "before": "noqueue"}
        assert json.loads(answer).items() >= expected.items()
        held = host_pair[0].queues()
        assert f"qdisc tbf 5a50: dev {host_pair[0].interface} root" in held[0]
        assert "rate 50Mbit" in held[0]
        assert f"gso_max_size {shape(50.0).segment}" in held
        if end == "closed":
            holds.stdin.write("close\n")
            holds.stdin.flush()
        elif end == "keeper told to end":
            os.kill(int(keeper), signal.SIGTERM)
        else:
            holds.send_signal(signal.SIGINT if end == "interrupted" else signal.SIGKILL)
        until(lambda: host_pair[0].queues() == before)


def test_the_queue_of_a_killed_keeper_is_named_with_what_removes_it(host_pair: list[Host]) -> None:
    """The next keeper does not replace the queue, since another run may be using it, and names the command that
    removes it.
    """
    before = host_pair[0].queues()
    command = [*host_pair[0].inside, *_KEEPER, towards(host_pair)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as keeper:
        keeper.stdout.readline()
        keeper.kill()
    left = host_pair[0].queues()
    assert left != before
    error = answer_of(host_pair)["error"]
    assert "the queue of another run" in error
    assert host_pair[0].queues() == left
    remove = error.partition("remove the queue with: ")[2]
    subprocess.run([*host_pair[0].inside, "sh", "-c", remove], check=True)
    assert host_pair[0].queues() == before
    assert "error" not in answer_of(host_pair)


def test_a_queue_that_may_still_be_there_is_an_error(host_pair: list[Host]) -> None:
    """The error has the command that removes the queue and restores the size of packets."""
    subprocess.run(
        [*host_pair[0].inside, "ip", "link", "set", host_pair[0].interface, "gso_max_size", "32768"],
        check=True,
    )
    before = host_pair[0].queues()
    command = [*host_pair[0].inside, sys.executable, "-c", _HOLD, towards(host_pair)]
    done = subprocess.run(command, cwd=ROOT, input="\n", capture_output=True, text=True, check=True)
    error, _, remove = done.stdout.splitlines()[1].partition("remove the queue with: ")
    assert error.startswith(
        f"the rate of {host_pair[0].interface} may still be limited (its keeper was killed); "
    )
    assert host_pair[0].queues() != before
    subprocess.run([*host_pair[0].inside, "sh", "-c", remove], check=True)
    assert host_pair[0].queues() == before


@pytest.mark.parametrize(
    ("first", "changes", "message"),
    [
        ("", {"interface": "lo"}, "lo is the loopback"),
        ("", {"interface": "nowhere"}, "no interface 'nowhere'"),
        (
            "tc qdisc add dev NAME root pfifo limit 100",
            {},
            "not the kernel's default; zeropp does not replace it",
        ),
        *long(
            ("", {"others": ["127.0.0.1"]}, "messages to 127.0.0.1 leave through lo"),
            ("", {"others": ["203.0.113.1"]}, "no route to 203.0.113.1"),
            (
                "",
                {"rate_mbit": 50_000.0},
                "50000 Mbit/s is more than a tbf queue allows; set cluster.rate below 34360 Mbit/s",
            ),
            (
                "ip link set dev NAME mtu 9000",
                {"rate_mbit": 10.0},
                "but a queue of 10 Mbit/s accepts packets of at most 3000 bytes; set cluster.rate to 36 Mbit/s",
            ),
            ("tc qdisc add dev NAME root handle 7: tbf rate 1gbit burst 9k latency 1s", {}, "tbf 7:"),
        ),
    ],
)
def test_refusals(host_pair: list[Host], first: str, changes: dict[str, object], message: str) -> None:
    """The error is one line with the reason, and the interface is left as it was."""
    command = first.replace("NAME", host_pair[0].interface)
    subprocess.run([*host_pair[0].inside, "sh", "-c", command], check=True)
    before = host_pair[0].queues()
    error = answer_of(host_pair, **changes)["error"]
    assert message in error
    assert "\n" not in error
    assert host_pair[0].queues() == before


@pytest.mark.needs("setpriv")
def test_without_the_right_to_shape_it_is_refused(host_pair: list[Host]) -> None:
    """The error names the capability that the process lacks."""
    before = host_pair[0].queues()
    unprivileged = ("setpriv", "--bounding-set", "-net_admin", "--inh-caps", "-net_admin")
    assert (
        "cannot be shaped: shaping needs root or CAP_NET_ADMIN" in answer_of(host_pair, unprivileged)["error"]
    )
    assert host_pair[0].queues() == before


def test_a_packet_fits_the_queue_where_it_is_not_refused() -> None:
    """At the lowest rate that the refusal suggests, packets of that size fit into the queue, headers included."""
    for mtu in (1500, 9000, 65520):
        queue = shape(mtu * 4e-3)
        assert mtu <= queue.segment
        assert queue.segment + HEADER_BYTES <= queue.burst
