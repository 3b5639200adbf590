"""Values of checkpoints are converted to JSON without loss, or refused in one line that names their place."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

from impl.checkpoint.commit import CheckpointError
from impl.checkpoint.json_values import from_json, to_json
from impl.checkpoint.save_load import load, save
from impl.comm.mesh import Mesh
from impl.policy.topology import Topology
from impl.zero import shard
from tests.support.ranks import on_threads
from tests.support.strategies import EXACT

NUMBERS = st.sampled_from([torch.tensor(0.1), torch.tensor(1 << 40), torch.tensor(2.0, dtype=torch.bfloat16)])
NUMPY = st.sampled_from(
    [np.float64(0.1), np.float32(1e-45), np.float16("inf"), np.int8(-3), np.uint64(2**64 - 1), np.bool_(1)]
)
TEXT = st.one_of(
    st.text(), st.sampled_from(["__tuple__", "__number__", "__numpy__", "__dict__", "__counter__"])
)
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXT, NUMBERS, NUMPY)
KEYS = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXT, NUMPY),
    lambda inner: st.lists(inner, max_size=2).map(tuple),
    max_leaves=3,
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(TEXT, inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
        st.dictionaries(KEYS, st.integers(-2, 3), max_size=3).map(Counter),
    ),
    max_leaves=8,
)


def through_text(value: Any) -> Any:
    return from_json(json.loads(json.dumps(to_json(value, "value"))))


@given(VALUES)
def test_values_come_back_through_text(value: Any) -> None:
    """Types come back too: tuples, counters and keys, numbers of tensors and NumPy, and the bits of floats."""
    assert repr(through_text(value)) == repr(value)


@pytest.mark.parametrize(
    "written",
    [
        {"a": [1, {"__tuple__": [2]}], "b": {"__number__": ["float32", 3.0]}, "c": {}},
        {"__dict__": 1, "__counter__": {}, "__ordered__": "x"},  # were names like others
    ],
)
def test_what_older_checkpoints_hold_is_read(written: Any) -> None:
    """Texts of older checkpoints have the same meaning."""
    value = from_json(written)
    assert value == {**written, **({"a": [1, (2,)], "b": 3.0} if "a" in written else {})}


def test_a_subclass_of_dict_comes_back_as_a_dict() -> None:
    """A defaultdict comes back as a dict, since its function cannot be saved."""
    back = through_text({"a": defaultdict(list, {1: [2]})})
    assert type(back["a"]) is dict
    assert back == {"a": {1: [2]}}


@dataclass
class Settings:
    rate: float = 0.1


class Pair(NamedTuple):
    first: int = 1


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, {2}]}, r"extra\['a'\]\[1\]: a value of type set cannot be saved"),
        ([torch.ones(1)], r"extra\[0\]: a value of type Tensor cannot"),
        ([np.ones(1)], r"extra\[0\]: a value of type ndarray cannot"),
        ([np.complex64(1)], r"extra\[0\]: a value of type complex64 cannot"),
        ([np.longdouble(1)], r"extra\[0\]: a value of type longdouble cannot"),
        ([1j], r"extra\[0\]: a value of type complex cannot"),
        ({"m": IntEnum("M", ["A"])["A"]}, r"extra\['m'\]: a value of type M cannot"),
        ([type("Real", (float,), {})(1.0)], r"extra\[0\]: a value of type Real cannot"),
        ({"s": {3: Settings()}}, r"extra\['s'\]\[3\]: a value of type Settings cannot"),
        ({"p": Pair()}, r"extra\['p'\]: a value of type Pair cannot"),
        ({"f": len}, r"extra\['f'\]: a value of type builtin_function_or_method cannot"),
        ({frozenset(): 1}, r"extra: key frozenset\(\): a value of type frozenset cannot"),
        ({torch.tensor(1): 1}, r"extra: key tensor\(1\) cannot be saved: use numbers or text"),
        ({(1, torch.tensor(1)): 1}, r"extra: key tensor\(1\) cannot be saved"),
    ],
)
def test_what_has_no_json_is_refused_by_its_place(value: Any, message: str) -> None:
    """Values of other types are refused; nothing is pickled, guessed or left out."""
    with pytest.raises(CheckpointError, match=message):
        to_json(value, "extra")


class Decay:
    """A learning rate as an object with state, which LambdaLR saves."""

    def __init__(self) -> None:
        self.seen: dict[int, float] = {}

    def __call__(self, step: int) -> float:
        self.seen[step] = 1 / (1 + step)
        return self.seen[step]


Optimizer = torch.optim.Optimizer
SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "lambda": lambda sgd: schedulers.LambdaLR(sgd, lambda step: 0.9**step),
    "lambda object": lambda sgd: schedulers.LambdaLR(sgd, Decay()),
    "multiplicative": lambda sgd: schedulers.MultiplicativeLR(sgd, lambda _: 0.95),
    "step": lambda sgd: schedulers.StepLR(sgd, 3, 0.5),
    "multi-step": lambda sgd: schedulers.MultiStepLR(sgd, [3, 5, 5, 8], 0.3),
    "constant": lambda sgd: schedulers.ConstantLR(sgd, 0.3, 6),
    "linear": lambda sgd: schedulers.LinearLR(sgd, 0.3, 1.0, 6),
    "exponential": lambda sgd: schedulers.ExponentialLR(sgd, 0.9),
    "cosine": lambda sgd: schedulers.CosineAnnealingLR(sgd, 7),
    "restarts": lambda sgd: schedulers.CosineAnnealingWarmRestarts(sgd, 3, 2),
    "polynomial": lambda sgd: schedulers.PolynomialLR(sgd, 9, 2.0),
    "plateau": lambda sgd: schedulers.ReduceLROnPlateau(sgd, patience=1, cooldown=1),
    "cyclic": lambda sgd: schedulers.CyclicLR(sgd, 0.01, 0.1, 3, cycle_momentum=False),
    "cyclic momentum": lambda sgd: schedulers.CyclicLR(sgd, 0.01, 0.1, 3, mode="exp_range", gamma=0.99),
    "cyclic object": lambda sgd: schedulers.CyclicLR(sgd, 0.01, 0.1, 3, scale_fn=Decay()),
    "one cycle": lambda sgd: schedulers.OneCycleLR(sgd, 0.2, 20),
    "three phases": lambda sgd: schedulers.OneCycleLR(sgd, 0.2, 20, three_phase=True),
    "in sequence": lambda sgd: schedulers.SequentialLR(
        sgd, [schedulers.LinearLR(sgd, 0.1, 1.0, 3), schedulers.MultiStepLR(sgd, [2, 4])], [3]
    ),
    "chained": lambda sgd: schedulers.ChainedScheduler(
        [schedulers.LinearLR(sgd, 0.1, 1.0, 3), schedulers.MultiStepLR(sgd, [2, 5])], sgd
    ),
    "swa": lambda sgd: SWALR(sgd, 0.03, 6),
    "swa linear": lambda sgd: SWALR(sgd, 0.03, 6, "linear"),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_resumed_scheduler_goes_on_with_the_same_rates(tmp_path: Path, name: str) -> None:
    """Any scheduler of torch, saved in ``extra`` after 4 of 12 steps: types, state and all later rates are equal."""

    def run(mesh: Mesh) -> None:
        zero = shard(nn.Linear(6, 6), mesh=mesh, policy=EXACT)
        sgd = torch.optim.SGD(zero.param_groups(), lr=0.1, momentum=0.9)
        scheduler = SCHEDULERS[name](sgd)
        rates(sgd, scheduler, 4)
        save(tmp_path, zero, [sgd], extra={"scheduler": scheduler.state_dict()})
        kept = repr(scheduler.state_dict())
        uninterrupted = rates(sgd, scheduler, 8)

        zero = shard(nn.Linear(6, 6), mesh=mesh, policy=EXACT)
        sgd = torch.optim.SGD(zero.param_groups(), lr=0.1, momentum=0.9)
        scheduler = SCHEDULERS[name](sgd)
        scheduler.load_state_dict(load(tmp_path, zero, [sgd]).extra["scheduler"])
        assert repr(scheduler.state_dict()) == kept
        assert rates(sgd, scheduler, 8) == uninterrupted

    def rates(sgd: Optimizer, scheduler: Any, steps: int) -> list[Any]:
        found = []
        for _ in range(steps):
            sgd.step()
            scheduler.step(*([1.0] if name == "plateau" else []))
            found.append([(group["lr"], group["momentum"]) for group in sgd.param_groups])
        return found

    on_threads(Topology(1, 1), run)


def test_every_scheduler_of_torch_is_tried() -> None:
    """If torch gets a new scheduler, this fails until it is added to the test above."""
    tried = set()

    def note(scheduler: Any) -> None:
        tried.add(type(scheduler))
        for inner in getattr(scheduler, "_schedulers", ()):
            note(inner)

    for make in SCHEDULERS.values():
        note(make(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)))
    base = schedulers.LRScheduler
    kinds = {kind for kind in vars(schedulers).values() if isinstance(kind, type) and issubclass(kind, base)}
    assert kinds - {base, schedulers._LRScheduler} <= tried
