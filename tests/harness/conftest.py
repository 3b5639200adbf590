"""The command line in the process of a test."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

Zeropp = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def zeropp(capsys: pytest.CaptureFixture[str]) -> Zeropp:
    """Runs a command that has to end with ``status``; returns its output."""
    from harness import cli  # which a GPU's machine cannot import

    def run(*arguments: object, status: int = 0) -> subprocess.CompletedProcess[str]:
        capsys.readouterr()
        command = [*map(str, arguments)]
        process = subprocess.CompletedProcess(command, cli.main(command), *capsys.readouterr())
        assert process.returncode == status, process.stderr
        return process

    return run
