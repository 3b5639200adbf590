"""Hypothesis budgets: quick by default, ``HYPOTHESIS_PROFILE=ci`` and ``nightly`` for longer ones.

The two short ones choose the same examples every time, so that a change is judged by itself; nightly
searches anew each night, and what it finds becomes an ``@example``.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support import needs

# Set before torch is imported, here or in child processes: workers and thread ranks fill the processors,
# and threads of one operation, which wait for each other by spinning, take twice the time.
# libgomp complains of an empty value, which counts as none.
os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or "1"
os.environ.pop("COLUMNS", None)  # xdist gives its workers 80: tests say how wide a terminal is

_RANK_PROCESSES = "harness.cluster.rank_processes"
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("quick", max_examples=20, derandomize=True, **_COMMON)
settings.register_profile("ci", max_examples=60, derandomize=True, **_COMMON)
settings.register_profile("nightly", max_examples=1000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

# A shell that starts the tests in the background lets them ignore Ctrl-C, and their children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Skip tests with missing components; preload ranks; freeze modules for the garbage collector."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    needs.skip_where_missing(session.items)
    if "tests.support.ranks" in sys.modules and (ranks := sys.modules.get(_RANK_PROCESSES)) is not None:
        ranks.__dict__["PRELOAD"] += ("pytest", "hypothesis.strategies", "tests.support.ranks")


@pytest.fixture(scope="session")
def libraries(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of libraries that tests build, kept for the next session in pytest's cache."""
    cache: pytest.Cache | None = getattr(request.config, "cache", None)  # absent with -p no:cacheprovider
    return tmp_path_factory.mktemp("kernels") if cache is None else cache.mkdir("kernels")


@pytest.fixture(scope="session")
def cuda_libraries(libraries: Path) -> Path:
    """The folder of CUDA sources compiled for the host."""
    return libraries


@pytest.fixture(autouse=True)
def _no_suite_was_read() -> Iterator[None]:
    """Inputs of suites are found from the working folder, unless a test reads a suite of another."""
    yield
    forget_suite()


def forget_suite() -> None:
    """Forget the suites that were read, and the modules that they imported."""
    from harness.suites import folder
    from impl import named_object
    from impl.codecs import own_object

    folder._folder = None
    folders = {str(path) for path in named_object._seen} - {str(Path(__file__).parents[1])}
    sys.path[:] = [path for path in sys.path if path not in folders]
    for name, module in [*sys.modules.items()] if folders else ():
        file = (getattr(module, "__file__", None) or "").removesuffix("/__init__.py")
        if str(Path(file).parent) in folders:
            del sys.modules[name]
    named_object._seen.clear()
    own_object.import_definition.cache_clear()
