"""Hypothesis budgets: quick by default, ``HYPOTHESIS_PROFILE=ci`` and ``nightly`` for longer ones."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("quick", max_examples=30, **_COMMON)
settings.register_profile("ci", max_examples=60, **_COMMON)
settings.register_profile("nightly", max_examples=1000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
