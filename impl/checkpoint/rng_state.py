"""Saves and restores the random number generators of a rank: torch's (CPU and device), Python's, NumPy's."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_states(device: torch.device) -> dict[str, Tensor]:
    """The states of this process's generators, each as (n,) uint8."""
    name, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002  # the one that programs draw from unasked
    numpy = [name, np.asarray(keys).tolist(), *rest]
    states = {"torch": torch.get_rng_state(), "python": _text(random.getstate()), "numpy": _text(numpy)}
    return states if device.type == "cpu" else {**states, "device": torch.cuda.get_rng_state(device)}


def load_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Go on where :func:`random_states` was called; a generator that is not named is left alone."""
    torch.set_rng_state(states["torch"])
    version, keys, last = _parsed(states["python"])
    random.setstate((version, tuple(keys), last))
    name, numbers, *rest = _parsed(states["numpy"])
    np.random.set_state((name, np.array(numbers, dtype=np.uint32), *rest))  # noqa: NPY002
    if device.type != "cpu" and "device" in states:
        torch.cuda.set_rng_state(states["device"], device)


def _text(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _parsed(state: Tensor) -> Any:
    return json.loads(state.numpy().tobytes())
