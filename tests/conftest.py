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

# Before torch is imported, here or in what tests start: workers and thread ranks fill the processors already,
# and threads of one operation, which wait for each other by spinning, take twice the time.
# An empty value, of which libgomp complains in every process, counts as none.
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
    """Skip tests that need what is not here; let ranks start with what test modules import, and let no
    collection of garbage walk through it: a tenth of all time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    needs.skip_where_missing(session.items)
    if "tests.support.ranks" in sys.modules and (ranks := sys.modules.get(_RANK_PROCESSES)) is not None:
        ranks.__dict__["PRELOAD"] += ("pytest", "hypothesis.strategies", "tests.support.ranks")


@pytest.fixture(scope="session")
def libraries(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where libraries that tests build are kept for the next session: in pytest's cache."""
    cache: pytest.Cache | None = getattr(request.config, "cache", None)  # absent with -p no:cacheprovider
    return tmp_path_factory.mktemp("kernels") if cache is None else cache.mkdir("kernels")


@pytest.fixture(scope="session")
def cuda_libraries(libraries: Path) -> Path:
    """Where CUDA sources are kept as they are compiled for the host."""
    return libraries


@pytest.fixture(autouse=True)
def _no_suite_was_read() -> Iterator[None]:
    """What suites name is found from the working folder, until a test reads a suite of another."""
    yield
    forget_suite()


def forget_suite() -> None:
    """As in a process that has read no suite, nor imported what one names."""
    from harness.suites import folder
    from impl import named_object
    from impl.codecs import own_object

    folder._folder = None
    theirs = {str(one) for one in named_object._seen} - {str(Path(__file__).parents[1])}
    sys.path[:] = [one for one in sys.path if one not in theirs]
    for name, module in [*sys.modules.items()] if theirs else ():
        file = (getattr(module, "__file__", None) or "").removesuffix("/__init__.py")
        if str(Path(file).parent) in theirs:
            del sys.modules[name]
    named_object._seen.clear()
    own_object.import_definition.cache_clear()
