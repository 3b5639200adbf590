"""Hosts of a cluster as network namespaces of this machine, each with a folder of its own."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.cluster.link import open_link
from harness.suites.trial import Cluster

ROOT = Path(__file__).parents[2]
_ENTER = """
import os, sys
from harness.cluster import netns_shaper
netns_shaper.enter(int(sys.argv[1]))
os.chdir(sys.argv[2])
os.execvp(sys.argv[3], sys.argv[3:])
"""


@dataclass(frozen=True)
class Host:
    address: str
    interface: str
    holder: int
    folder: Path

    def start(self, command: Sequence[str], **environment: str) -> subprocess.Popen[str]:
        """Start a command there, its output in the folder's file ``output``."""
        kept = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
        with (self.folder / "output").open("a") as output:
            return subprocess.Popen(
                [sys.executable, "-c", _ENTER, str(self.holder), str(self.folder), *command],
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                env=kept | {"PYTHONPATH": str(ROOT)} | environment,
            )

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()

    def listening(self) -> set[str]:
        """Addresses on which somebody there listens now, as the kernel writes them."""
        lines = [
            line.split()
            for name in ("tcp", "tcp6")
            for line in Path(f"/proc/{self.holder}/net/{name}").read_text().splitlines()[1:]
        ]
        return {words[1].partition(":")[0] for words in lines if words[3] == "0A"}

    @property
    def inside(self) -> list[str]:
        ours = Path(f"/proc/{self.holder}/ns/user").samefile("/proc/self/ns/user")
        return ["nsenter", "-t", str(self.holder), "-n", *([] if ours else ["-U", "--preserve-credentials"])]

    def queues(self) -> list[str]:
        """What tc says of its interfaces, and ip of the largest packets that they are handed."""
        told = [
            subprocess.run([*self.inside, *words], capture_output=True, text=True, check=True).stdout
            for words in (("tc", "qdisc"), ("ip", "-d", "link"))
        ]
        return [told[0], *re.findall(r"gso_max_size \d+", told[1])]

    @property
    def address_hex(self) -> str:
        return socket.inet_aton(self.address)[::-1].hex().upper()


@contextlib.contextmanager
def hosts(count: int, folder: Path, files: Mapping[str, str]) -> Iterator[list[Host]]:
    """``count`` hosts, joined by a network without a rate, with copies of ``files`` in their folders."""
    with open_link(Cluster(link="namespaces", nodes=count), f"{os.getpid():x}"[-6:]) as link:
        found = []
        for number, port in enumerate(link.ports):
            own = folder / f"host{number}"
            own.mkdir(parents=True)
            for name, text in files.items():
                (own / name).write_text(text)
            found.append(Host(port.address, port.interface, port.holder, own))
        yield found


def lines_of(section: str) -> list[list[str]]:
    """The commands that docs/guide/cluster.md has under a heading."""
    page = (ROOT / "docs" / "guide" / "cluster.md").read_text()
    _, _, text = page.partition(f"\n## {section}\n")
    blocks = text.partition("\n## ")[0].split("```")[1::2]
    return [shlex.split(line) for block in blocks for line in block.splitlines()[1:]]


def type_lines(found: Sequence[Host], lines: Sequence[Sequence[str]], suite: str) -> list[int]:
    """Type one line of the page on each host, of this suite and the first host; their exit statuses."""
    names = {"mine.toml": suite, "--master-addr=first": f"--master-addr={found[0].address}"}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # of torchrun and zeropp
    started = [
        host.start([names.get(word, word) for word in line], PATH=path)
        for host, line in zip(found, lines, strict=True)
    ]
    try:
        return [process.wait(timeout=400) for process in started]
    finally:
        for process in started:
            process.kill()


@contextlib.contextmanager
def sshd(host: Host) -> Iterator[str]:
    """Serve ssh on a host; yields the PATH with which ``ssh`` gets there without a question."""
    own = host.folder / "ssh"
    (own / "bin").mkdir(parents=True)
    for name in ("host", "user"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(own / name)]
        subprocess.run(command, check=True)
    (own / "authorized").write_text((own / "user.pub").read_text())
    (own / "authorized").chmod(0o600)
    (own / "server").write_text(
        f"ListenAddress {host.address}\nHostKey {own}/host\nAuthorizedKeysFile {own}/authorized\n"
        f"StrictModes no\nPidFile {own}/pid\nPermitRootLogin yes\nUsePAM no\n"
        f"SetEnv PYTHONPATH={ROOT}\n"
    )
    (own / "client").write_text(
        f"Host *\nIdentityFile {own}/user\nUserKnownHostsFile {own}/known\nStrictHostKeyChecking no\n"
        "LogLevel ERROR\n"
    )
    wrapper = own / "bin" / "ssh"
    wrapper.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {own}/client "$@"\n')
    wrapper.chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)
    server = host.start(["/usr/sbin/sshd", "-D", "-f", str(own / "server")])
    try:
        yield f"{own / 'bin'}:{os.environ['PATH']}"
    finally:
        server.terminate()
        server.wait()
