"""Control channel between the supervisors of a run's nodes: small JSON messages through one key-value store.

Every host runs one supervisor, which starts and watches that node's ranks and outlives them.  The first
node's leads: it says what is run.  Under torchrun the store is the job's own; else the first node serves it.
What others send is parsed as JSON and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import psutil

from harness.cluster.link import Port
from harness.errors import Refusal

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

POLL_SECONDS: Final = 0.05
LOST_SECONDS: Final = 20.0  # without a heartbeat a node is lost
_BEAT_SECONDS: Final = 1.0
_SLURM_PORTS: Final = range(20_000, 32_000)  # below those that kernels give to clients
_JOIN: Final = timedelta(seconds=300)  # for all nodes to come together
_ANSWER: Final = timedelta(seconds=60)  # of the store, for one operation


class ChannelError(Exception):
    """The store does not answer any more: whoever served it has ended."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which node of a run this supervisor is, and where the store of all is served."""

    node: int
    nodes: int
    host: str
    port: int  # of the store; 0 lets the process that serves it choose one
    serves: bool  # whether this process serves the store
    job: str = ""  # differs between runs that share a store
    waits: bool = False  # whether it is no supervisor, but another process that was started on its node

    @property
    def follows(self) -> bool:
        """Whether this is not the process that says what is run."""
        return self.waits or self.node != 0

    def ranks_of(self, work: int) -> Place:
        """Where the ranks of all hosts meet for a piece of work, by its number."""
        return replace(self, job=f"{self.job}/ranks/{work}")


def place_under_torchrun(environment: Mapping[str, str] = os.environ) -> Place | None:
    """This process's place by torchrun's variables, of which a Refusal names a missing one; None outside."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    node, local = _number(environment, "GROUP_RANK"), _number(environment, "LOCAL_RANK")
    agents = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Place(
        node=node,
        nodes=_number(environment, "GROUP_WORLD_SIZE"),
        host=environment.get("MASTER_ADDR", ""),
        port=_number(environment, "MASTER_PORT"),
        serves=not agents and node == local == 0,
        job=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
        waits=local != 0,
    )


def place_in_slurm(environment: Mapping[str, str] = os.environ) -> Place | None:
    """This process's place by the variables of a Slurm job step; None outside."""
    if "SLURM_STEP_ID" not in environment or "SLURM_STEP_NODELIST" not in environment:
        return None
    node, nodes = _number(environment, "SLURM_NODEID"), _number(environment, "SLURM_STEP_NUM_NODES")
    local = _number(environment, "SLURM_LOCALID")
    job, step = _number(environment, "SLURM_JOB_ID"), _number(environment, "SLURM_STEP_ID")
    listed = _scontrol("hostnames", environment["SLURM_STEP_NODELIST"]).split()
    serves = node == local == 0
    host = address_towards(_slurm_address(listed[1])) if serves and nodes > 1 else _slurm_address(listed[0])
    return Place(
        node=node,
        nodes=nodes,
        host=host,
        port=_SLURM_PORTS.start + (16 * job + step) % len(_SLURM_PORTS),
        serves=serves,
        job=f"{job}.{step}",
        waits=local != 0,
    )


def _scontrol(*what: str) -> str:
    try:
        return subprocess.run(["scontrol", "show", *what], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise Refusal(f"scontrol show {' '.join(what)}: {error}") from error


def _slurm_address(name: str) -> str:
    """How Slurm reaches a node."""
    found = re.search(r"NodeAddr=(\S+)", _scontrol("node", name))
    return found[1] if found else name


def address_towards(host: str) -> str:
    """This machine's address from which ``host`` is reached, a Refusal if it is not; nothing is sent."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise Refusal(f"host {host!r} cannot be reached: {error.strerror or error}") from error


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdecimal():
        raise Refusal(f"{name} = {text!r} in the environment: expected a number, as the launcher sets it")
    return int(text)


class Channel:
    """One supervisor's end of the control channel; a context manager, in which its heart beats."""

    def __init__(self, place: Place) -> None:
        """Connect to the store, or serve it; a Refusal if nobody answers there, or the port is taken."""
        self.place = place
        self._store = self._connect(serve=place.serves)
        self._beats: dict[int, tuple[Any, float]] = {}
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._beat, daemon=True, name="heartbeat")

    def __enter__(self) -> Self:
        self._heart.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._heart.join()

    def post(self, key: str, value: Any) -> None:
        """Store ``value`` as JSON; a ChannelError if the store is gone."""
        try:
            self._store.set(key, json.dumps(value))
        except RuntimeError as error:
            raise ChannelError(_line(error)) from error

    def read(self, key: str) -> Any:
        """What was posted under ``key``; None if nothing was yet. A ChannelError if the store is gone."""
        try:
            return json.loads(self._store.get(key)) if self._store.check([key]) else None
        except (RuntimeError, ValueError) as error:
            raise ChannelError(_line(error)) from error

    def wait(self, key: str, *, of: int = 0, meanwhile: Callable[[], None] = lambda: None) -> Any:
        """Wait for what node ``of`` posts, calling ``meanwhile``; a ChannelError if that node is lost."""
        while (found := self.read(key)) is None:
            if self.lost(of):
                raise ChannelError(f"node {of} of {self.place.nodes} does not answer any more")
            meanwhile()
            time.sleep(POLL_SECONDS)
        return found

    def lost(self, node: int) -> bool:
        """Whether a node's heart has not beaten for a while, longer where it may have to be started yet."""
        now, found = time.monotonic(), self.read(f"beat/{node}")
        if node not in self._beats or found != self._beats[node][0]:
            self._beats[node] = (found, now)
        patience = LOST_SECONDS if found is not None else _JOIN.seconds
        return node != self.place.node and now - self._beats[node][1] > patience

    def _beat(self) -> None:
        """Count up every second, over a connection of its own."""
        with contextlib.suppress(RuntimeError, Refusal):  # whoever waits for the store notices
            store = self._connect(serve=False)
            while not self._ended.wait(_BEAT_SECONDS):
                store.add(f"beat/{self.place.node}", 1)

    def _connect(self, *, serve: bool) -> Store:
        import torch.distributed as dist

        place = self.place
        options: dict[str, Any] = {"is_master": serve, "timeout": _JOIN, "wait_for_workers": False}
        try:
            if serve:
                family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
                listening = socket.create_server((place.host, place.port), family=family, backlog=1024)
                self.place = place = replace(place, port=listening.getsockname()[1])
                options["master_listen_fd"] = listening.detach()
            store = dist.TCPStore(place.host, place.port, **options)  # type: ignore[attr-defined]
        except (OSError, RuntimeError) as error:
            done = "serve" if serve else "reach"
            raise Refusal(
                f"node {place.node} of {place.nodes} cannot {done} {place.host}:{place.port}, where the "
                f"nodes meet: {_line(error)}"
            ) from error
        store.set_timeout(_ANSWER)
        return dist.PrefixStore(f"zeropp/{place.job}", store)  # type: ignore[attr-defined]


def _line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def port_towards(channel: Channel) -> Port:
    """The interface of this host that leads to the other nodes, with its address; a Refusal if there is none.

    A node takes the address from which it reaches the first node, which takes that at which others reach it.
    """
    place = channel.place
    if (named := os.environ.get("GLOO_SOCKET_IFNAME")) is not None:
        return Port(named, _address_of(named))
    if place.nodes == 1:
        return Port("lo", "127.0.0.1")
    if place.node == 0:
        address = str(channel.wait("reached", of=1))
    else:
        try:
            with socket.create_connection((place.host, place.port), timeout=_ANSWER.seconds) as connection:
                address, reached = connection.getsockname()[0], connection.getpeername()[0]
        except OSError as error:
            raise Refusal(f"node {place.node} cannot reach {place.host}:{place.port}: {error}") from error
        if place.node == 1:
            channel.post("reached", reached)
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return Port(name, address)
    raise Refusal(f"no interface of node {place.node} has the address {address}; set GLOO_SOCKET_IFNAME")


def _address_of(interface: str) -> str:
    found = psutil.net_if_addrs().get(interface)
    if not found:
        raise Refusal(f"GLOO_SOCKET_IFNAME = {interface!r}: there is no such interface here")
    return next((one.address for one in found if one.family == socket.AF_INET), found[0].address)


def host_identity() -> str:
    """What two supervisors share only if they stand on one host, in one network namespace."""
    boot, space = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    try:
        return f"{boot.read_text(encoding='ascii').strip()} {space.readlink()}"
    except OSError:
        return socket.gethostname()
