"""Starts a suite on a Slurm cluster: submits a job that runs all its trials, or runs them in the present job.

- Outside of a Slurm job, :func:`submit` submits a command line of ``zeropp`` as a new job, through submitit.
- In a job's own shell, such as the shell of ``salloc``, :func:`step` starts the command line on all nodes with
  ``srun``.  Slurm calls the processes that one ``srun`` starts a job step.
- In a process that ``srun`` has already started, neither function is needed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from harness.cluster import run_token
from harness.errors import Refusal
from harness.suites.trial import Cluster

JOBS: Final = "jobs"  # folder in a suite's results for the files of Slurm and submitit
_COMMAND: Final = (sys.executable, "-m", "harness.cli")


class Job:
    """A command line that Slurm runs on every node of the job."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.arguments = list(arguments)

    def __call__(self) -> int:
        """Run the command line; returns its exit status."""
        return subprocess.run([*_COMMAND, *self.arguments], check=False).returncode

    def checkpoint(self) -> Any:
        """Tell submitit to submit the same command line again when the job reaches its time limit or is preempted.

        submitit calls this method and submits what it returns.  The new job continues the suite, since trials that
        have records are not run again.
        """
        import submitit

        return submitit.helpers.DelayedSubmission(Job(self.arguments))


def options_of(cluster: Cluster) -> dict[str, int | str | bool]:
    """Return the options with which Slurm allocates nodes.

    By default, whole nodes are allocated and, on device ``cuda``, one GPU for each rank.  The suite's own options
    (``cluster.slurm``) are added, and replace defaults of the same name.  An option that the suite sets to false is
    left out, since submitit would pass it to Slurm as the text "False".
    """
    # Other jobs on a node would disturb its timings.
    options: dict[str, int | str | bool] = {"exclusive": True}
    if cluster.device == "cuda":
        options["gpus_per_node"] = cluster.ranks_per_node
    return {name: value for name, value in (options | cluster.slurm).items() if value is not False}


def submit(arguments: Sequence[str], cluster: Cluster, name: str, folder: Path) -> str:
    """Submit one job for a command line.

    Args:
        arguments: The command line after ``zeropp``.
        cluster: The largest cluster of the suite, with options for Slurm.
        name: Name of the job.
        folder: Results folder of the suite.

    Returns:
        The job's number.

    Raises:
        Refusal: If submitit is not installed, or Slurm does not accept the job.
    """
    try:
        import submitit
    except ImportError as error:
        raise Refusal(
            "cluster.launcher = 'slurm' needs submitit outside of a job: pip install 'submitit>=1.5'"
        ) from error
    try:
        executor = submitit.SlurmExecutor(folder=folder / JOBS, max_num_timeout=100)
        options = options_of(cluster)
        executor.update_parameters(
            job_name=name, nodes=cluster.nodes, ntasks_per_node=1, use_srun=True, **options
        )
        run_token.set_in_environment()  # sbatch hands the environment to the job
        return str(executor.submit(Job(arguments)).job_id)
    except (RuntimeError, ValueError, TypeError, OSError, submitit.core.utils.FailedJobError) as error:
        raise Refusal(
            f"Slurm did not accept the job: {error}; change cluster.slurm, or the number of nodes and ranks"
        ) from error


def step(arguments: Sequence[str], nodes: int) -> None:
    """Replace this process by ``srun``, which starts the command line once on each node.

    This process must be inside a Slurm job, and ``srun`` must not have started it.

    Args:
        arguments: The command line after ``zeropp``.
        nodes: Number of nodes.

    Raises:
        Refusal: If ``srun`` cannot be started.
    """
    command = ["srun", f"--nodes={nodes}", "--ntasks-per-node=1", *_COMMAND]
    run_token.set_in_environment()  # srun hands the environment to the job step
    try:
        os.execvp("srun", [*command, *arguments])  # noqa: S606  # no shell is needed
    except OSError as error:
        raise Refusal(
            f"srun cannot be started: {error.strerror}; put Slurm's programs on PATH, or set cluster.launcher = "
            "'torchrun'"
        ) from error
