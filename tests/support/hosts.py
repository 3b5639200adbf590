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
from harness.shaping import netns_shaper
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
        """Start a command on this host, with its output in the folder's file ``output``."""
        inherited = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
        with (self.folder / "output").open("a") as output:
            return subprocess.Popen(
                [sys.executable, "-c", _ENTER, str(self.holder), str(self.folder), *command],
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                env=inherited | {"PYTHONPATH": str(ROOT)} | environment,
            )

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()

    def listening(self) -> set[str]:
        """Addresses on which a process listens, in hexadecimal as the kernel writes them."""
        lines = [
            line.split()
            for name in ("tcp", "tcp6")
            for line in Path(f"/proc/{self.holder}/net/{name}").read_text().splitlines()[1:]
        ]
        return {columns[1].partition(":")[0] for columns in lines if columns[3] == "0A"}

    @property
    def inside(self) -> list[str]:
        same_user = Path(f"/proc/{self.holder}/ns/user").samefile("/proc/self/ns/user")
        user = [] if same_user else ["-U", "--preserve-credentials"]
        return ["nsenter", "-t", str(self.holder), "-n", *user]

    def queues(self) -> list[str]:
        """The output of tc, and the sizes of the largest packets by that of ip."""
        outputs = [
            subprocess.run([*self.inside, *command], capture_output=True, text=True, check=True).stdout
            for command in (("tc", "qdisc"), ("ip", "-d", "link"))
        ]
        return [outputs[0], *re.findall(r"gso_max_size \d+", outputs[1])]

    @property
    def address_hex(self) -> str:
        return socket.inet_aton(self.address)[::-1].hex().upper()


@contextlib.contextmanager
def hosts(count: int, folder: Path, files: Mapping[str, str]) -> Iterator[list[Host]]:
    """``count`` hosts, joined by a network without a rate, with copies of ``files`` in their folders."""
    with open_link(Cluster(link="namespaces", nodes=count), f"{os.getpid():x}"[-6:]) as link:
        started = []
        for number, port in enumerate(link.ports):
            assert port.interface is not None
            assert port.holder is not None
            home = folder / f"host{number}"
            home.mkdir(parents=True)
            for name, text in files.items():
                (home / name).write_text(text)
            started.append(Host(port.address, port.interface, port.holder, home))
        yield started


def lines_of(section: str) -> list[list[str]]:
    """The commands under a heading of docs/guide/cluster.md."""
    page = (ROOT / "docs" / "guide" / "cluster.md").read_text()
    _, _, text = page.partition(f"\n## {section}\n")
    blocks = text.partition("\n## ")[0].split("```")[1::2]
    return [shlex.split(line) for block in blocks for line in block.splitlines()[1:]]


def type_lines(cluster: Sequence[Host], lines: Sequence[Sequence[str]], suite: str) -> list[int]:
    """Run one line of the page on each host, with its suite and first host filled in; exit statuses."""
    names = {"mine.toml": suite, "--master-addr=first": f"--master-addr={cluster[0].address}"}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # of torchrun and zeropp
    started = [
        host.start([names.get(word, word) for word in line], PATH=path)
        for host, line in zip(cluster, lines, strict=True)
    ]
    try:
        return [process.wait(timeout=400) for process in started]
    finally:
        for process in started:
            process.kill()


@contextlib.contextmanager
def sshd(host: Host) -> Iterator[str]:
    """Serve ssh on a host; yields the PATH with which ``ssh`` reaches it unattended."""
    files = host.folder / "ssh"
    (files / "bin").mkdir(parents=True)
    for name in ("host", "user"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(files / name)]
        subprocess.run(command, check=True)
    (files / "authorized").write_text((files / "user.pub").read_text())
    (files / "authorized").chmod(0o600)
    (files / "server").write_text(
        f"ListenAddress {host.address}\nHostKey {files}/host\nAuthorizedKeysFile {files}/authorized\n"
        f"StrictModes no\nPidFile {files}/pid\nPermitRootLogin yes\nUsePAM no\n"
        f"SetEnv PYTHONPATH={ROOT}\n"
    )
    (files / "client").write_text(
        f"Host *\nIdentityFile {files}/user\nUserKnownHostsFile {files}/known\nStrictHostKeyChecking no\n"
        "LogLevel ERROR\n"
    )
    wrapper = files / "bin" / "ssh"
    wrapper.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {files}/client "$@"\n')
    wrapper.chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)
    server = host.start(["/usr/sbin/sshd", "-D", "-f", str(files / "server")])
    try:
        yield f"{files / 'bin'}:{os.environ['PATH']}"
    finally:
        server.terminate()
        server.wait()
