"""Where kernels for the host are compiled, once: pytest's cache."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def cuda_libraries(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where compiled sources are kept."""
    cache: pytest.Cache | None = getattr(request.config, "cache", None)  # absent with -p no:cacheprovider
    return tmp_path_factory.mktemp("cuda_on_cpu") if cache is None else cache.mkdir("cuda_on_cpu")
