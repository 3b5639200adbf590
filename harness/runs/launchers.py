"""Finds this process's place among the processes that a launcher started: torchrun, Slurm or ssh.

A launcher starts one supervisor per node with the same command line.  A supervisor is the process that starts and
watches the ranks of its node.  The supervisor of node 0 leads: it runs the sweep, and has the other supervisors start
the ranks of their nodes (:mod:`harness.cluster.node_supervisors`).  The place is read from the launcher's environment
variables.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from harness.cluster import remote
from harness.cluster.control_channel import Place
from harness.cluster.node_supervisors import Nodes, lead
from harness.cluster.port import address_towards
from harness.errors import Refusal
from harness.measure import run_environment
from harness.suites.labels import counted
from harness.suites.trial import Cluster, Trial

_LAST_STEP: Final = 0xFFFFFFF0  # larger step numbers mean the allocation's own shell, script or container
_SLURM_PORTS: Final = range(20_000, 32_000)  # below the ports that kernels give to clients


def clusters(trials: Sequence[Trial]) -> list[Cluster]:
    """Return the distinct clusters of those trials that need a launcher, the cluster with the most nodes first.

    A trial's cluster is its field ``cluster``: the nodes, the ranks and the link between nodes.

    Raises:
        Refusal: If the clusters differ in launcher, hosts or options of Slurm.
    """
    distinct = {t.cluster.model_dump_json(): t.cluster for t in trials if t.cluster.launcher != "local"}
    for name in ("launcher", "hosts", "slurm"):
        values = {str(getattr(cluster, name)) for cluster in distinct.values()}
        if len(values) > 1:
            raise Refusal(
                f"cluster.{name}: all trials need the same value, but this suite has {', '.join(sorted(values))}; "
                "write a suite for each value"
            )
    return sorted(distinct.values(), key=lambda cluster: -cluster.nodes)


def place(trials: Sequence[Trial]) -> Place | None:
    """Return this process's place in a run: its node, the number of nodes, and the address where all nodes meet.

    The place is read from the environment variables of the launcher: torchrun, Slurm, or ssh (``hosts``).  Returns None
    if no trial needs a launcher.

    Raises:
        Refusal: If the launcher did not start this process, or started too few nodes.
    """
    if not (requested := clusters(trials)):
        return None
    largest = requested[0]
    started = place_in_slurm() if largest.launcher == "slurm" else place_under_torchrun()
    if started is None and largest.launcher == "hosts":
        started = remote.place_of(largest.hosts)
    if started is None and largest.launcher == "slurm":
        raise Refusal(
            "cluster.launcher = 'slurm': this process is not in a Slurm job step; start it with srun zeropp ..."
        )
    if started is None:
        raise Refusal(
            "cluster.launcher = 'torchrun': torchrun did not start this process; run this on every host: "
            f"torchrun --nnodes={largest.nodes} --nproc-per-node=1 --node-rank=... --master-addr=... "
            "--no-python zeropp run ..."
        )
    if started.nodes < largest.nodes:
        advice = f"; run zeropp in the job's own shell, or start srun --overlap --nodes={largest.nodes} "
        advice = (
            f"{advice}--ntasks-per-node=1 zeropp ..."
            if largest.launcher == "slurm"
            else f"; start {largest.nodes} nodes, or set cluster.nodes = {started.nodes}"
        )
        count = f"the launcher started {counted(started.nodes, 'node')}"
        raise Refusal(f"cluster.nodes is {largest.nodes}, but {count}{advice}")
    return started


def slurm_cluster(trials: Sequence[Trial]) -> Cluster | None:
    """Return the cluster for which this process must first start a Slurm job or job step; None if none must be started.

    The result is the trials' cluster with the most nodes.  It is None if the trials do not use Slurm, or if this
    process is in a job step already.

    Raises:
        Refusal: If this process is in a Slurm job that has fewer nodes than the trials need.
    """
    largest = next((cluster for cluster in clusters(trials) if cluster.launcher == "slurm"), None)
    if largest is None or in_step():
        return None
    has = os.environ.get("SLURM_JOB_NUM_NODES", "")
    if "SLURM_JOB_ID" in os.environ and has.isdecimal() and int(has) < largest.nodes:
        raise Refusal(
            f"cluster.nodes is {largest.nodes}, but this Slurm job has {counted(int(has), 'node')}: allocate "
            f"{largest.nodes} (salloc --nodes={largest.nodes}), or set cluster.nodes = {has}"
        )
    return largest


def in_step(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is in a job step that ``srun`` started, with a process on every node.

    Returns False in the shell that ``salloc`` starts on the first node (an interactive step), and in the script of a
    batch job: both run on one node only, and a job step has yet to be started from them.
    """
    step = environment.get("SLURM_STEP_ID", "")
    return "SLURM_STEP_NODELIST" in environment and step.isdecimal() and int(step) <= _LAST_STEP


@contextlib.contextmanager
def lead_nodes(
    leader: Place | None, trials: Sequence[Trial], *, same_code: bool = True
) -> Iterator[Nodes | None]:
    """Connect to the supervisors of all nodes, yield the nodes, and disconnect when the ``with`` block ends.

    A supervisor is the process that starts and watches the ranks of a node; the launcher started one on each node.  If
    ``leader`` is None, all ranks run on this machine, and None is yielded.

    Args:
        leader: The place of this process, which must be on node 0 (:func:`place`); None if no trial needs a launcher.
        trials: All trials of the suite.
        same_code: Whether all nodes must run the same version of the code.

    Raises:
        Refusal: If not all supervisors connect, if a connection is lost, or if nodes run different versions of the code
            although ``same_code`` is True.
    """
    if leader is None:
        yield None
        return
    with lead(leader, run_environment.identity(), clusters(trials)[0].hosts) as nodes:
        if same_code:
            nodes.check_code()
        yield nodes


def place_under_torchrun(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Return this process's place from torchrun's variables; None if torchrun did not start this process.

    The place (:class:`Place`) has the process's node, the number of nodes, and the address where all nodes meet.

    Raises:
        Refusal: If a variable is missing.
    """
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
    """Return this process's place from the variables of its Slurm job step; None if it is in no job step.

    The place (:class:`Place`) has the process's node, the number of nodes, and the address where all nodes meet.
    """
    if not in_step(environment):
        return None
    node, nodes = _number(environment, "SLURM_NODEID"), _number(environment, "SLURM_STEP_NUM_NODES")
    local = _number(environment, "SLURM_LOCALID")
    job, step = _number(environment, "SLURM_JOB_ID"), _number(environment, "SLURM_STEP_ID")
    names = _scontrol("hostnames", environment["SLURM_STEP_NODELIST"]).split()
    serves = node == local == 0
    host = address_towards(_slurm_address(names[1])) if serves and nodes > 1 else _slurm_address(names[0])
    return Place(
        node=node,
        nodes=nodes,
        host=host,
        port=_SLURM_PORTS.start + (16 * job + step) % len(_SLURM_PORTS),
        serves=serves,
        job=f"{job}.{step}",
        waits=local != 0,
    )


def _scontrol(kind: str, name: str) -> str:
    """Return the output of ``scontrol show KIND NAME``; raises a Refusal if the command fails."""
    command = ["scontrol", "show", kind, name]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise Refusal(
            f"cluster.launcher = 'slurm': `{' '.join(command)}` failed ({error}); run it by hand to see why"
        ) from error


def _slurm_address(node: str) -> str:
    """Return the address at which Slurm reaches a node."""
    address = re.search(r"NodeAddr=(\S+)", _scontrol("node", node))
    return address[1] if address else node


def _number(environment: Mapping[str, str], name: str) -> int:
    """Return a variable as a number; raises a Refusal if the variable is missing or is not a number."""
    text = environment.get(name, "")
    if not text.isdecimal():
        raise Refusal(f"{name} = {text!r} in the environment: expected a number, as the launcher sets it")
    return int(text)
