"""Builds the C++ kernels once, on machines that can build them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from impl.cpu import build
from impl.cpu.kernels import Kernels
from tests.impl.codecs.properties import Backend, Run

# Built for any x86 or Arm processor, so that the loops without AVX-512 are tested too.
PLAIN = tuple(flag for flag in build.FLAGS if flag not in ("-march=native", "-mprefer-vector-width=512"))


@pytest.fixture(scope="session", params=["native", "plain"])
def backend(request: pytest.FixtureRequest, libraries: Path) -> Backend:
    """The kernels on the CPU, built for this processor and for every processor of its kind.

    Those for this processor are the library in the user's cache, which all tests that train need anyway.
    """
    native = request.param == "native"
    library = build.library(build.user_folder()) if native else build.library(libraries, flags=PLAIN)
    return Backend(Kernels(library), Run(), torch.device("cpu"))
