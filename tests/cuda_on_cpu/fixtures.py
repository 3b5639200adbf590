"""Where kernels for the host are compiled, once: pytest's cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda_on_cpu import host


@pytest.fixture(scope="session")
def libraries(request: pytest.FixtureRequest) -> Path:
    """Where compiled sources are kept, on machines that can compile them."""
    reason = host.missing()
    if reason is not None:
        pytest.skip(reason)
    cache = request.config.cache
    assert cache is not None
    return cache.mkdir("cuda_on_cpu")
