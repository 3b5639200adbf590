"""The command line in the process of a test."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

Zeropp = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def zeropp(capsys: pytest.CaptureFixture[str]) -> Zeropp:
    """Runs a command that ends with the ``status`` that is expected; gives what it said."""
    from harness import cli  # which a GPU's machine cannot import

    def run(*arguments: object, status: int = 0) -> subprocess.CompletedProcess[str]:
        capsys.readouterr()
        words = [*map(str, arguments)]
        done = subprocess.CompletedProcess(words, cli.main(words), *capsys.readouterr())
        assert done.returncode == status, done.stderr
        return done

    return run
