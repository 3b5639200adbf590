"""Launchers: which of a launcher's processes this is, and the nodes that it leads."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from harness.cluster import remote
from harness.cluster.control_channel import Place
from harness.cluster.node_supervisors import Nodes, leading
from harness.cluster.port import address_towards
from harness.errors import Refusal
from harness.measure import run_environment
from harness.suites.trial import Cluster, Trial

_SLURM_PORTS: Final = range(20_000, 32_000)  # below those that kernels give to clients


def clusters(trials: Sequence[Trial]) -> list[Cluster]:
    """The distinct clusters of a launcher's trials, most nodes first; a Refusal of several launchers."""
    found = {t.cluster.model_dump_json(): t.cluster for t in trials if t.cluster.launcher != "local"}
    several = sorted(found.values(), key=lambda one: -one.nodes)
    for name in ("launcher", "hosts", "slurm"):
        named = {str(getattr(one, name)) for one in several}
        if len(named) > 1:
            raise Refusal(f"one run has one cluster.{name}; this suite has {', '.join(sorted(named))}")
    return several


def place(trials: Sequence[Trial]) -> Place | None:
    """This process's place among those of the trials' launcher, None without one; or a Refusal."""
    asked = clusters(trials)
    if not asked:
        return None
    most = asked[0]
    found: Place | None
    if most.launcher == "hosts":
        found = place_under_torchrun() or remote.place_of(most.hosts)
    elif most.launcher == "slurm":
        if (found := place_in_slurm()) is None:
            raise Refusal("cluster.launcher = 'slurm': this process is in no job step; start it by srun")
    elif (found := place_under_torchrun()) is None:
        raise Refusal(
            "cluster.launcher = 'torchrun': this process was not started by it; start on every host "
            f"torchrun --nnodes={most.nodes} --nproc-per-node=1 --node-rank=... --master-addr=... "
            "--no-python zeropp run ..."
        )
    if found.nodes < most.nodes:
        raise Refusal(f"cluster.nodes is {most.nodes}, the launcher started {found.nodes} nodes")
    return found


def for_slurm(trials: Sequence[Trial]) -> Cluster | None:
    """The cluster that Slurm has yet to give nodes to, or to start steps on; None if there is none."""
    asked = clusters(trials)
    outside = "SLURM_STEP_NODELIST" not in os.environ
    return asked[0] if asked and asked[0].launcher == "slurm" and outside else None


@contextlib.contextmanager
def gathered(
    here: Place | None, trials: Sequence[Trial], *, same_code: bool = True
) -> Iterator[Nodes | None]:
    """Lead a launcher's nodes in the body, None without one; with ``same_code`` a Refusal of other code."""
    if here is None:
        yield None
        return
    with leading(here, run_environment.identity(), clusters(trials)[0].hosts) as nodes:
        if same_code:
            nodes.check_code()
        yield nodes


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


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdecimal():
        raise Refusal(f"{name} = {text!r} in the environment: expected a number, as the launcher sets it")
    return int(text)
