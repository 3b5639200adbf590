"""Suites across hosts, which are network namespaces here: no shared file system, no variables to set.

Each launcher walks through two trials, one of which crashes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.cluster.control_channel import Channel, Place
from harness.errors import Refusal
from harness.records.trial_record import LinkRecord, Record, read_all, read_valid
from harness.runs import launchers
from harness.runs import slurm as jobs
from harness.runs.launchers import place_under_torchrun
from harness.suites.trial import Cluster, Trial
from tests.harness.cluster.test_rank_processes import until
from tests.support.hosts import ROOT, hosts, lines_of, sshd, type_lines
from tests.support.needs import SEARCHED


def _ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]


@contextlib.contextmanager
def slurm(folder: Path, nodes: int = 2) -> Iterator[dict[str, str]]:
    """Start Slurm; yields the environment in which its commands find it."""
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
            states = subprocess.run(
                ["sinfo", "-h", "-o", "%D %t"], env=environment, capture_output=True, text=True, check=False
            ).stdout.split()
            if states == [str(nodes), "idle"]:
                break
            time.sleep(0.5)
        else:
            logs = [path.read_text(errors="replace")[-500:] for path in folder.glob("*.log")]
            raise AssertionError(f"Slurm did not start: {states} {logs}")
        yield environment
    finally:
        for options in (["--full"], ["-s", "KILL"]):
            command = ["scancel", *options, "--partition=debug"]
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


TORCHRUN = "Starting a suite with torchrun"  # the heading of its lines in docs/guide/cluster.md
SUITE = """
name = "walk"
question = "Does a sweep across hosts always finish?"
time = "a minute"

[defaults]
model.name = "faulty:model"
sequence = 32
tokens_per_rank = 64
steps = 2
warmup = 1
validate_every = 0
validation_batches = 1
measure_quantisation = false
timeout_seconds = 120
policy.max_padding = 0.5

[defaults.cluster]
nodes = 2
ranks_per_node = 2
launcher = "torchrun"

[matrix]
strategy = ["qgz"]
seed = [0, 1]

[[override]]
match = { strategy = "qgz", seed = 0 }
set = { model.arguments = { fault = "crash" } }
"""


@pytest.mark.long
@pytest.mark.needs("namespaces")
def test_a_suite_with_failing_ranks_finishes_across_hosts(tmp_path: Path) -> None:
    """With torchrun on two hosts, one of two trials crashes on a rank of the second host; records and report are
    written on the first.
    """
    with hosts(2, tmp_path, walk("torchrun")) as both:
        assert type_lines(both, lines_of(TORCHRUN), "walk.toml") == [1, 1], both[0].output
        first, second = both
        assert not list(second.folder.rglob("*.json"))
        output, _, _ = second.output.partition("failed (exitcode")  # torchrun's own lines follow
        assert "Traceback" not in output
        check(first.folder, "real", "distinct hosts")


def rates(link: str, strategies: str) -> str:
    """Return the suite without faults, at two rates instead of several seeds."""
    text = SUITE.partition("[[override]]")[0].replace('["qgz"]', strategies)
    text = text.replace('launcher = "torchrun"', f'launcher = "torchrun"\nlink = "{link}"')
    return text.replace("seed = [0, 1]", "cluster.rate = ['50 Mbit/s', '200 Mbit/s']")


def reached(link: LinkRecord, rate: float) -> bool:
    """Return whether no message was faster than the rate, and the best of calibration and probes reached 0.95 of it.

    Other processes on this machine can only make single messages late.
    """
    return 0.95 * rate <= max(*link.calibrated_mbit, *link.probed_mbit) <= rate


@pytest.mark.long
@pytest.mark.needs("namespaces")
def test_a_rate_between_hosts_is_kept_by_pacing(tmp_path: Path) -> None:
    """With torchrun on two hosts and a paced link, calibration and probes reach 0.95 to 1.0 of the requested rate,
    and the page calls the results modelled.
    """
    text = rates("paced", '["qgz"]').replace("faulty:model", "gpt-tiny").replace("'50 Mbit/s', ", "")
    with hosts(2, tmp_path, {"walk.toml": text}) as both:
        assert type_lines(both, lines_of(TORCHRUN), "walk.toml") == [0, 0], both[0].output
        (record,) = read_all(both[0].folder / "results" / "walk")
        assert (record.link.kind, record.link.why) == ("paced", "distinct hosts")
        assert reached(record.link, record.trial["cluster"]["rate"])
        page = (both[0].folder / "results" / "walk" / "report.html").read_text()
        assert "modelled" in page


@pytest.mark.long
@pytest.mark.needs("root", "namespaces", "ip", "nsenter")
def test_a_rate_between_hosts_is_kept_by_their_interfaces(tmp_path: Path) -> None:
    """With torchrun on two hosts and a shaped link, calibration and probes reach 0.95 to 1.0 of each requested rate.

    Peers may run, a trial that crashes is recorded, and the queues are removed afterwards.
    """
    text = rates("shaped", '["zero3", "ddp"]') + (
        '[[exclude]]\nstrategy = "zero3"\ncluster.rate = "200 Mbit/s"\n'
        '[[override]]\nmatch = { strategy = "ddp", cluster.rate = "50 Mbit/s" }\n'
        'set = { model.arguments = { fault = "crash" } }\n'
    )
    with hosts(2, tmp_path, walk("torchrun") | {"walk.toml": text}) as both:
        before = [host.queues() for host in both]
        assert type_lines(both, lines_of(TORCHRUN), "walk.toml") == [1, 1], both[0].output
        assert [host.queues() for host in both] == before
        records = read_all(both[0].folder / "results" / "walk")
        failed = [record.failure.kind for record in records if record.failure is not None]
        assert failed == ["crashed"]
        assert len(records) == 3
        for record in records:
            rate = record.trial["cluster"]["rate"]
            assert (record.link.kind, record.link.why) == ("shaped", "distinct hosts")
            assert record.link.requested_mbit == rate
            assert len(record.link.calibrated_mbit) == 5
            assert len(record.link.probed_mbit) == (0 if record.failure else 2)
            assert reached(record.link, rate)
            assert [node["before"] for node in record.link.details["nodes"]] == ["noqueue", "noqueue"]
        page = (both[0].folder / "results" / "walk" / "report.html").read_text()
        assert "Throttled: nodes are hosts" in page
        assert "modelled" not in page


@functools.cache
def local_measurements() -> dict[tuple[str, int], object]:
    """Return ledgers and losses, by strategy and seed, of the trial that does not fail, from a run on one machine."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in walk("local").items():
            Path(folder, name).write_text(text.partition("[[override]]")[0].replace("[0, 1]", "[1]"))
        command = [sys.executable, "-m", "harness.cli", "run", "--no-report", "walk.toml"]
        subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
        return measurements(read_all(Path(folder, "results", "walk")))


def measurements(records: Iterable[Record]) -> dict[tuple[str, int], object]:
    """Return ledgers and losses of results, by strategy and seed."""
    return {
        (record.trial["strategy"], record.trial["seed"]): [
            (rank.ledger, [step.loss for step in rank.steps]) for rank in record.ranks
        ]
        for record in records
        if record.failure is None
    }


def check(folder: Path, kind: str, why: str) -> None:
    """Check that a folder has the results of a run on one machine, the expected failures, and the report."""
    records = {record.id: record for record in read_all(folder / "results" / "walk")}
    assert measurements(records.values()) == local_measurements()
    assert [r.failure.kind for r in records.values() if r.failure is not None] == ["crashed"]
    assert len(records) == 2
    for record in records.values():
        assert (record.link.kind, record.link.why) == (kind, why)
        if record.failure is None:
            assert [rank.node for rank in record.ranks] == [0, 0, 1, 1]
            assert record.predicted.equal
        else:
            assert "rank 3" in record.failure.message
            assert record.failure.tail
            assert (folder / "results" / "walk" / record.failure.log).is_file()
    assert (folder / "results" / "walk" / "report.html").is_file()


def walk(launcher: str, keys: str = "") -> dict[str, str]:
    """Return the files of a suite of two trials, the first of which fails."""
    suite = SUITE.replace('launcher = "torchrun"', f'launcher = "{launcher}"\n{keys}')
    return {"walk.toml": suite, "faulty.py": (Path(__file__).parent / "faulty.py").read_text()}


def output_of(command: list[str], environment: dict[str, str]) -> str:
    """Return the standard output of one of Slurm's commands."""
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.long
@pytest.mark.needs("slurm", "root")
def test_a_suite_with_failing_ranks_finishes_under_slurm(tmp_path: Path) -> None:
    """One job runs all trials on two nodes, and a rank that crashes is recorded.

    Halfway the job is told that its time is over; it is queued again, and continues.
    """
    for name, text in walk("slurm", 'slurm = { partition = "debug", time = 10 }').items():
        (tmp_path / name).write_text(text)
    line = [sys.executable, "-m", "harness.cli"]
    with slurm(tmp_path / "slurm") as environment:
        common = {"cwd": tmp_path, "env": environment | {"PYTHONPATH": str(ROOT)}, "text": True}
        submitted = subprocess.run([*line, "run", "walk.toml"], capture_output=True, check=False, **common)
        assert submitted.returncode == 0, submitted.stderr
        assert re.search(r"Slurm job \d+: 2 trials into results/walk", submitted.stderr)
        job, first = re.findall(r"job (\d+)", submitted.stderr)[0], tmp_path / "results" / "walk"
        until(lambda: first.exists() and read_valid(first)[0])  # other trials are still to be run
        finished = {path: path.read_bytes() for path in first.glob("*.json")}
        output_of(["scancel", "--signal=USR2", job], environment)
        until(lambda: output_of(["squeue", "-h", "-o", "%T", "-j", job], environment) == "PENDING")
        # Not in two minutes; in the second in which it was killed its credential is revoked.
        output_of(["scontrol", "update", f"JobId={job}", "StartTime=now+3"], environment)
        log = next((first / "jobs").glob("*_0_log.out"))
        until(lambda: log.read_text().count("Starting with JobEnvironment") == 2)
        assert "Caught signal SIGUSR2" in log.read_text()
        followed = subprocess.run(
            [*line, "show", "walk.toml", "--follow"],
            capture_output=True, check=False, timeout=300, **common,
        )  # fmt: skip
        assert followed.returncode == 0, followed.stderr
        assert followed.stdout.count(" ok") == 1
        assert {path: path.read_bytes() for path in finished} == finished
        again = subprocess.run(
            ["srun", "-N2", "--ntasks-per-node=1", *line, "run", "walk.toml"],
            capture_output=True, check=False, timeout=300, **common,
        )  # fmt: skip
        assert again.returncode == 1  # after the job, which has the nodes to itself
        check(tmp_path, "none", "nodes 0 and 1 are one host")
        assert "1 of 2 trials failed before; --retry-failed runs them again" in again.stderr


@pytest.mark.long
@pytest.mark.needs("namespaces", "root", "ssh", "sshd")
def test_a_suite_with_failing_ranks_finishes_on_hosts(tmp_path: Path) -> None:
    """One command on the first host starts the supervisor of the second through ssh.

    Sockets listen only on the address that leads from host to host, or on the host's loopback.
    """
    with hosts(2, tmp_path, {}) as both, sshd(both[1]) as path:
        names = json.dumps([host.address for host in both])
        for host in both:
            for name, text in walk("hosts", f"hosts = {names}").items():
                (host.folder / name).write_text(text)
        command = [sys.executable, "-m", "harness.cli", "run", "walk.toml"]
        run, listening = both[0].start(command, PATH=path), [set[str](), set[str]()]
        while run.poll() is None:
            for host, addresses in zip(both, listening, strict=True):
                addresses.update(host.listening())
            time.sleep(0.02)
        assert run.wait() == 1, both[0].output
        loopback = {"0100007F", "0" * 24 + "01000000"}  # 127.0.0.1 and ::1
        for host, addresses in zip(both, listening, strict=True):
            assert host.address_hex in addresses
            assert addresses <= {host.address_hex} | loopback
        check(both[0].folder, "real", "distinct hosts")
        assert not list(both[1].folder.rglob("*.json"))
        command[3] = "doctor"
        assert both[0].start(command, PATH=path).wait(timeout=240) == 0, both[0].output
        # The interfaces are named after their hosts, and so differ.
        assert "The nodes differ in: interface." in both[0].output
        assert "2 nodes on 2 hosts." in both[0].output


# Another user, who prints what is readable, and posts commands until the run ends.
STRANGER = """
import os
import sys
import time
import torch.distributed as dist
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
store = dist.PrefixStore("zeropp/0", dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False))
print(store.get("session"), store.get("node/1"), flush=True)
try:
    while True:
        for number in range(1, 4):  # the leading supervisor may just have posted one of its own
            store.set(f"command/{number}", '{"status": 0}')
        time.sleep(0.005)
except RuntimeError:
    pass
"""


@pytest.mark.long
@pytest.mark.needs("root")
def test_another_user_cannot_command_a_run_under_torchrun(tmp_path: Path) -> None:
    """Two agents on this host run without ZEROPP_TOKEN; another user in their store ends the run in one line, and
    reads nothing that it says.
    """
    (port,), text = _ports(1), SUITE.partition("[[override]]")[0].replace("faulty:model", "gpt-tiny")
    (tmp_path / "walk.toml").write_text(text.replace("seed = [0, 1]", "seed = [0]"))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("ZEROPP_TOKEN", None)
    agents, outputs = [], [tmp_path / f"output{node}" for node in range(2)]
    try:
        for node, output in enumerate(outputs):
            command = [
                sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}",
                "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}", "--no-python",
                sys.executable, "-m", "harness.cli", "run", "--no-report", str(tmp_path / "walk.toml"),
            ]  # fmt: skip
            with output.open("w") as file:
                agents.append(
                    subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=file, stderr=file)
                )
        stranger = subprocess.Popen(
            [sys.executable, "-c", STRANGER, str(port)], stdout=subprocess.PIPE, text=True
        )
        assert all(agent.wait(timeout=300) != 0 for agent in agents)
        read, _ = stranger.communicate(timeout=60)
    finally:
        for process in (*agents, stranger):
            process.kill()
    wanted = r"'command/\d' in the store at 127.0.0.1:\d+ comes from no process of this run"
    assert re.search(wanted, outputs[1].read_text())
    assert len(read) > 1000
    assert not re.search("nonce|facts|interface", read)


def test_the_place_follows_from_torchruns_variables() -> None:
    """The first process of a node is its supervisor, and the others wait; without torchrun there is no place."""
    variables = {
        "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_RANK": "1",
        "LOCAL_RANK": "0", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
    }  # fmt: skip
    assert place_under_torchrun({}) is None
    assert place_under_torchrun(variables) == Place(1, 2, "10.0.0.1", 29500, serves=False, job="0")
    idle = place_under_torchrun(variables | {"LOCAL_RANK": "1", "GROUP_RANK": "0"})
    assert idle.waits
    assert idle.follows
    with pytest.raises(Refusal, match="GROUP_RANK = '' in the environment"):
        place_under_torchrun({name: value for name, value in variables.items() if name != "GROUP_RANK"})
    with pytest.raises(Refusal, match=json.dumps("MASTER_PORT")[1:-1]):
        place_under_torchrun(variables | {"MASTER_PORT": "x"})


SLURM = {
    "SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NODEID": "0",
    "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_NUM_NODES": "1",
}  # fmt: skip
ALLOCATION = {"interactive": "4294967290", "batch": "4294967291", "batch, before 20.11": "4294967294"}


@pytest.fixture
def slurm_variables(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the variables of a step on one node of a job of two, whose addresses are known."""
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    answers = {"hostnames": "n1\n", "node": "NodeAddr=127.0.0.1"}
    monkeypatch.setattr(launchers, "_scontrol", lambda kind, _: answers[kind])
    return SLURM


@pytest.mark.parametrize("step", [*ALLOCATION.values(), "batch", None], ids=[*ALLOCATION, "named", "none"])
def test_the_shell_of_an_allocation_is_no_job_step(
    slurm_variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, step: str | None
) -> None:
    """From the shell of an allocation, a run starts a step on all nodes; inside a step that srun started, it has a
    place.
    """
    if step is None:
        monkeypatch.delenv("SLURM_STEP_NODELIST")
    else:
        monkeypatch.setenv("SLURM_STEP_ID", step)
    two = Trial(cluster=Cluster(nodes=2, launcher="slurm", transport="gloo"))
    assert launchers.slurm_cluster([two]) == two.cluster
    assert launchers.place_in_slurm() is None
    three = two.model_copy(update={"cluster": two.cluster.model_copy(update={"nodes": 3})})
    with pytest.raises(
        Refusal, match=r"cluster.nodes is 3, but this Slurm job has 2 nodes: allocate 3 \(salloc"
    ):
        launchers.slurm_cluster([three])


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({}, {"exclusive": True, "gpus_per_node": 8}),
        ({"time": 60, "exclusive": False}, {"time": 60, "gpus_per_node": 8}),
        ({"gres": "gpu:8", "gpus_per_node": False}, {"exclusive": True, "gres": "gpu:8"}),
        ({"gpus_per_node": "h100:8"}, {"exclusive": True, "gpus_per_node": "h100:8"}),
    ],
)
def test_a_job_asks_for_whole_nodes_and_gpus(given: dict[str, Any], options: dict[str, Any]) -> None:
    """Unless the suite says otherwise; what it sets to false is left out."""
    cluster = Cluster(device="cuda", transport="nccl", ranks_per_node=8, launcher="slurm", slurm=given)
    assert jobs.options_of(cluster) == options
    assert jobs.options_of(Cluster(launcher="slurm")) == {"exclusive": True}


def test_a_job_step_has_a_place(slurm_variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has as many nodes as srun was given; if the suite needs more, the refusal says how to start it."""
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    one, two = (Trial(cluster=Cluster(nodes=n, launcher="slurm", transport="gloo")) for n in (1, 2))
    assert launchers.slurm_cluster([two]) is None
    place = launchers.place([one])
    assert place is not None
    assert (place.node, place.nodes, place.job) == (0, 1, "1.0")
    with pytest.raises(
        Refusal, match=r"nodes is 2, but the launcher started 1 node; run zeropp in .* --nodes=2"
    ):
        launchers.place([two])


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_nodes_meet_at_an_ipv6_address() -> None:
    """The store is served at that address, and an error separates address and port."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    place = Place(0, 1, "::1", 0, serves=True, job="six")
    with Channel(place) as channel:
        channel.post("key", [1])
        assert channel.read("key") == [1]
        taken = dataclasses.replace(place, port=channel.place.port)
        with pytest.raises(Refusal, match=r"cannot serve \[::1\]:\d+, where the nodes meet"):
            Channel(taken)
