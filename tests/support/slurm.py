"""A Slurm of this machine alone: a controller and daemons for two nodes, with a key of their own."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.needs import SEARCHED


def _ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in opened]


@contextlib.contextmanager
def slurm(folder: Path, nodes: int = 2) -> Iterator[dict[str, str]]:
    """Start it; yields the environment in which its commands find it."""
    folder.mkdir(parents=True, mode=0o755)
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    host, (first, *ports) = socket.gethostname().partition(".")[0], _ports(nodes + 1)
    cores = len(os.sched_getaffinity(0))
    lines = [
        "ClusterName=test", f"SlurmctldHost={host}(127.0.0.1)", f"SlurmctldPort={first}",
        "AuthType=auth/munge", f"AuthInfo=socket={folder}/munge.sock", "CryptoType=crypto/munge",
        "SlurmUser=root", "SlurmdUser=root", f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool.%n", f"SlurmctldPidFile={folder}/controller.pid",
        f"SlurmdPidFile={folder}/%n.pid", f"SlurmctldLogFile={folder}/controller.log",
        f"SlurmdLogFile={folder}/%n.log", "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none",
        "SelectType=select/cons_tres", "SelectTypeParameters=CR_Core", "ReturnToService=2", "MpiDefault=none",
        "SlurmdParameters=config_overrides",
        *(
            f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cores}"
            for number, port in enumerate(ports)
        ),
        f"PartitionName=debug Nodes=n[0-{nodes - 1}] Default=YES MaxTime=INFINITE State=UP",
    ]  # fmt: skip
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": SEARCHED}
    daemons = [
        ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.sock",
         f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log", f"--seed-file={folder}/seed"],
        ["slurmctld", "-D"],
        *(["slurmd", "-D", "-N", f"n{number}"] for number in range(nodes)),
    ]  # fmt: skip
    started: list[subprocess.Popen[bytes]] = []
    try:
        for command in daemons:
            with (folder / f"{command[0]}.out").open("ab") as output:
                started.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
            time.sleep(0.5)
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            told = subprocess.run(
                ["sinfo", "-h", "-o", "%D %t"], env=environment, capture_output=True, text=True, check=False
            ).stdout.split()
            if told == [str(nodes), "idle"]:
                break
            time.sleep(0.5)
        else:
            logs = [path.read_text(errors="replace")[-500:] for path in folder.glob("*.log")]
            raise AssertionError(f"Slurm did not start: {told} {logs}")
        yield environment
    finally:
        for how in (["--full"], ["-s", "KILL"]):
            command = ["scancel", *how, "--partition=debug"]
            subprocess.run(command, env=environment, capture_output=True, check=False, timeout=20)
        time.sleep(1)
        for process in reversed(started):
            process.terminate()
        for process in started:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
