"""Submits a suite to Slurm as one job, whose allocation runs all trials, and starts a job's steps."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from harness.errors import Refusal
from harness.suites.trial import Cluster

JOBS: Final = "jobs"  # folder of a suite's results, for what Slurm and submitit write
_COMMAND: Final = (sys.executable, "-m", "harness.cli")


class Job:
    """The command line, as Slurm runs it on every node inside the job."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.arguments = list(arguments)

    def __call__(self) -> int:
        """Run the suite; returns the exit status."""
        return subprocess.run([*_COMMAND, *self.arguments], check=False).returncode

    def checkpoint(self) -> Any:
        """The same job again, which goes on where it was; called before a time limit or a preemption."""
        import submitit

        return submitit.helpers.DelayedSubmission(Job(self.arguments))


def submit(arguments: Sequence[str], cluster: Cluster, name: str, folder: Path) -> str:
    """Submit one job for the command line ``arguments`` and return its number, or a Refusal."""
    try:
        import submitit
    except ImportError as error:
        raise Refusal(
            "launcher 'slurm' needs submitit outside of a job: pip install 'submitit>=1.5'"
        ) from error
    try:
        executor = submitit.SlurmExecutor(folder=folder / JOBS, max_num_timeout=100)
        options = {"exclusive": True} | cluster.slurm  # other jobs on a node would disturb its timings
        gpus = {"gpus_per_node": cluster.ranks_per_node} if cluster.device == "cuda" else {}
        executor.update_parameters(
            job_name=name, nodes=cluster.nodes, ntasks_per_node=1, use_srun=True, **gpus, **options
        )
        return str(executor.submit(Job(arguments)).job_id)
    except (RuntimeError, ValueError, TypeError, OSError, submitit.core.utils.FailedJobError) as error:
        raise Refusal(f"Slurm did not take the job: {error}") from error


def step(arguments: Sequence[str], nodes: int) -> None:
    """Replace this process, inside a job but in none of its steps, by a step with a process on each node."""
    command = ["srun", f"--nodes={nodes}", "--ntasks-per-node=1", *_COMMAND]
    try:
        os.execvp("srun", [*command, *arguments])  # noqa: S606  # no shell is needed
    except OSError as error:
        raise Refusal(f"srun: {error.strerror}") from error
