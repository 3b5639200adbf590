"""Finds out by steps on small tensors whether an optimizer is elementwise, as shards need.

An optimizer of masters sees 1-D pieces of parameters, cut anywhere.  Copies of the optimizer take the same
steps on a whole tensor and on pieces of it: if these differ, a sharded model would be trained by another
algorithm.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from impl.errors import raised

NUMEL: Final = 12288  # of a whole tensor; its pieces have more than 4096, from which on states are quantised
CUT: Final = 5117  # where it is cut: no multiple of a block that shares a scale
SHAPES: Final = ((96, 128), (3, 4, 32, 32))  # of the whole, beside 1-D
STEPS: Final = 8
KEPT: Final = 2  # tensors of each group that are stepped
_SIZES: Final = (1e-3, 1.0, 100.0)  # of gradients in turn, for limits of every size
_RATE: Final = 0.01  # in place of a learning rate of zero
_SLACK: Final = 1e-4  # of an element's way: vectorised loops round their last elements differently

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)

# Classes whose steps are not tried: those of torch that pass with any options, by a test, and users' own.
ELEMENTWISE: Final[set[type[Optimizer]]] = {
    getattr(torch.optim, name)
    for name in (
        *("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax"),
        *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
    )
}


def elementwise(kind: type[AnyOptimizer]) -> type[AnyOptimizer]:
    """Vouch that optimizers of class ``kind`` may step shards, so that the engine takes them untried.

    Not for its subclasses.  May be used as a decorator.
    """
    ELEMENTWISE.add(kind)
    return kind


def why_not(optimizer: Optimizer, *, closure: bool = False) -> str | None:
    """Why an optimizer must not step shards, as a sentence that its name begins; None if it may.

    ``optimizer``, the states of random numbers and the counters of its class stay as they are.  With a
    ``closure`` its steps get one.
    """
    return _why_not(optimizer, closure=closure, every=False)


def _why_not(optimizer: Optimizer, *, closure: bool, every: bool) -> str | None:
    """:func:`why_not`; the first tensors of each group are stepped, or ``every`` one."""
    wrong = "so on shards it would be another algorithm; take one that is, such as AdamW"
    task = _Task.draw()
    with _restored(optimizer) as drew:
        try:
            flat, low, high, *shaped = twins = [
                _Twin(optimizer, task, (NUMEL,), every=every),
                _Twin(optimizer, task, (CUT,), every=every),
                _Twin(optimizer, task, (NUMEL - CUT,), first=CUT, every=every),
                *(_Twin(optimizer, task, shape, every=every) for shape in SHAPES),
            ]
        except Exception as error:  # of a user's code
            return _unknown(optimizer, f"to copy it raised {raised(error)}")
        before, way = flat.weights(), torch.zeros_like(flat.weights())
        for number in range(STEPS):
            errors = [twin.step(number, closure=closure) for twin in twins]
            if any(errors):
                if not every:  # whose attributes may count on it
                    return _why_not(optimizer, closure=closure, every=True)
                if not closure and "closure" in inspect.signature(type(optimizer).step).parameters:
                    return _why_not(optimizer, closure=True, every=True)
                if errors[0] is not None and errors[3] is None:
                    return f"is not elementwise: on 1-D tensors, as shards are, its step raises {errors[0]}"
                return _unknown(optimizer, f"its steps on small tensors raised {next(filter(None, errors))}")
            whole, pieces = flat.weights(), torch.cat([low.weights(), high.weights()], 1)
            way += (whole - before).abs()
            before = whole
            alike = [_alike(flat.options(), piece.options()) for piece in (low, high)]
            if not (_same(whole, pieces, way) and all(alike)):
                if drew():
                    return (
                        "is not elementwise: it draws random numbers, and for shards other ones than for the "
                        f"whole{_way_out(optimizer)}"
                    )
                return (
                    "is not elementwise: its steps on two pieces of a tensor differ from those on the whole, "
                    f"as with a norm or a mean over it, {wrong}"
                )
            for twin in shaped:
                if not _same(whole, twin.weights(), way):
                    return (
                        f"is not elementwise: its steps on a tensor of {len(twin.shape)} dimensions differ "
                        f"from those on the same elements in 1-D, as shards are, {wrong}"
                    )
    if not (way.isfinite() & (way > 0)).any():
        return _unknown(optimizer, f"{STEPS} steps on small tensors changed nothing")
    return None


def _unknown(optimizer: Optimizer, why: str) -> str:
    return f"is not known to be elementwise: {why}{_way_out(optimizer)}"


def _way_out(optimizer: Optimizer) -> str:
    return f"; if it may step shards, say so by impl.zero.elementwise({type(optimizer).__name__})"


def _same(whole: Tensor, other: Tensor, way: Tensor) -> bool:
    """Whether weights (K, N) are equal but for rounding, measured by the ``way`` of each element."""
    equal = (whole == other) | (whole.isnan() & other.isnan())
    near = (whole - other).abs() <= _SLACK * way + 1e-6 * whole.abs()
    return bool((equal | near).all())


def _alike(options: Tensor, others: Tensor) -> bool:
    """Whether steps have made the same of two copies' options."""
    close = partial(torch.allclose, rtol=_SLACK, atol=0.0, equal_nan=True)
    return options.shape == others.shape and close(options, others)


def bare_step(kind: type[Optimizer]) -> Callable[..., Any]:
    """A class's step without the wrappers of torch, which call hooks and import the compiler."""
    step: Any = kind.step
    while hasattr(step, "__wrapped__") and step.__globals__["__name__"] == Optimizer.__module__:
        step = step.__wrapped__
    return step  # type: ignore[no-any-return]


class _Task(NamedTuple):
    """What each tensor is trained on: (N,) ``start`` and ``bowl``, (STEPS, N) ``slopes``."""

    start: Tensor  # of many sizes, and every eighth is 0, where the smallest change shows
    slopes: Tensor  # gradients at 0; their mean is not 0, as in training
    bowl: Tensor  # what a weight adds to its gradient, times the weight, in steps with a closure

    @classmethod
    def draw(cls) -> _Task:
        generator = torch.Generator("cpu").manual_seed(0)
        draw: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
        start, noise = torch.randn(2, NUMEL, **draw)
        size, trend, bowl = torch.rand(3, NUMEL, **draw)
        start *= 10 ** (-3 * size)
        start[::8] = 0.0
        slopes = [
            (2 * trend - 1 + noise.roll(97 * number)) * _SIZES[number % len(_SIZES)]
            for number in range(STEPS)
        ]
        return cls(start, torch.stack(slopes), bowl)


class _Twin:
    """A copy of an optimizer whose tensors are probes, (n,) elements from ``first`` in one ``shape``."""

    def __init__(
        self, optimizer: Optimizer, task: _Task, shape: tuple[int, ...], *, first: int = 0, every: bool
    ) -> None:
        self.shape, part = shape, slice(first, first + math.prod(shape))
        self._slopes = task.slopes[:, part].view(STEPS, *shape)
        self._bowl = task.bowl[part].view(shape)
        self._optimizer, self._probes = _copy(optimizer, task.start[part].view(shape), part, every=every)

    def weights(self) -> Tensor:
        """(K, n) fp32 of all probes, on the host."""
        return torch.stack([probe.detach().flatten().float().cpu() for probe in self._probes])

    def options(self) -> Tensor:
        """(M,) numbers among the options, where some optimizers keep what they adapt."""
        groups = self._optimizer.param_groups
        numbers = [value for group in groups for value in group.values() if isinstance(value, int | float)]
        return torch.tensor(numbers, dtype=torch.float64, device="cpu")

    def step(self, number: int, *, closure: bool) -> str | None:
        """Take the step of a ``number``; the error that it raised, if any."""

        def evaluate() -> Tensor:
            losses = []
            for probe in self._probes:
                slope, bowl, weights = self._slopes[number].to(probe), self._bowl.to(probe), probe.detach()
                probe.grad = slope + bowl * weights if closure else slope.clone()
                losses.append((weights * (slope + bowl * weights / 2)).sum().cpu())
            return torch.stack(losses).sum()

        evaluate()
        step = bare_step(type(self._optimizer))
        try:
            with torch.no_grad():
                step(self._optimizer, *([evaluate] if closure else []))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # of a user's code, SystemExit too
            return raised(error)
        return None


def _copy(optimizer: Optimizer, start: Tensor, part: slice, *, every: bool) -> tuple[Any, list[nn.Parameter]]:
    """A copy of an optimizer that steps probes, which have the values ``start``, in place of its tensors.

    It has the same options and attributes, and the same state: of what has the size of one of its tensors,
    elements ``part`` of as many as the whole has, which repeat.
    """
    probes: list[nn.Parameter] = []
    copies: dict[int, Any] = {}  # by id of the original, as copy.deepcopy() notes them
    sizes: set[torch.Size] = set()
    tensors: dict[int, nn.Parameter] = {}  # probes by id of the original

    def cut(tensor: Tensor) -> Tensor:
        """What stands for a state of the size of one of the tensors."""
        values = tensor.detach().flatten()[:NUMEL]
        if not values.numel():
            return torch.zeros(start.shape, dtype=tensor.dtype, device=tensor.device)
        repeated = values.repeat(-(-NUMEL // values.numel()))[part]
        return repeated.view(start.shape).clone()

    def copied(value: Any) -> Any:
        """A copy of an attribute, an option or a state, in which probes stand for tensors."""
        if id(value) in copies:
            return copies[id(value)]
        result: Any
        if isinstance(value, Optimizer):  # the given one, or one inside it
            result = copies[id(value)] = object.__new__(type(value))
            for name, attribute in vars(value).items():
                hooks = name.startswith("_optimizer_") and name.endswith("_hooks")
                if name != "step":  # a learning rate scheduler's, which would step the given one
                    result.__dict__[name] = OrderedDict() if hooks else copied(attribute)
        elif type(value) in (Tensor, nn.Parameter) and value.shape in sizes:
            result = copies[id(value)] = cut(value)
        elif isinstance(value, dict):
            result = copies[id(value)] = copy.copy(value)
            result.clear()
            for key, entry in value.items():
                new = tensors.get(key) if type(key) is int else None  # a state by id
                result[copied(key) if new is None else id(new)] = copied(entry)
            if "params" in result and result.get("lr", 1) == 0:  # as where a warm-up begins
                result["lr"] = result["lr"] + (result.get("initial_lr") or _RATE)
        elif type(value) is list:
            result = copies[id(value)] = []
            result += map(copied, value)
        elif type(value) in (tuple, set):
            result = copies[id(value)] = type(value)(map(copied, value))
        else:
            result = copy.deepcopy(value, copies)
        return result

    for group in optimizer.param_groups:
        params = group["params"]
        for number, tensor in enumerate(params):
            values = start if every or number < KEPT else start.new_empty(0)
            probe = nn.Parameter(values.to(tensor, copy=True), requires_grad=tensor.requires_grad)
            copies[id(tensor)] = tensors[id(tensor)] = probe
            sizes.add(tensor.shape)
        if not every:
            for option in (params, group.get("param_names", [])):
                copies[id(option)] = [copied(entry) for entry in option[:KEPT]]
        probes += [tensors[id(tensor)] for tensor in (params if every else params[:KEPT])]
    return copied(optimizer), probes


@contextlib.contextmanager
def _restored(optimizer: Optimizer) -> Iterator[Callable[[], bool]]:
    """What the body does to random numbers and to counters of the optimizer's classes is undone.

    Yields whether random numbers were drawn.
    """
    devices = {tensor.device for group in optimizer.param_groups for tensor in group["params"]}
    generators = [torch.default_generator]
    generators += [torch.cuda.default_generators[d.index or 0] for d in devices if d.type == "cuda"]
    states, pythons = [generator.get_state() for generator in generators], random.getstate()
    arrays: Any = sys.modules.get("numpy.random")
    numpys = None if arrays is None else arrays.get_state()
    counters = [
        (kind, name, value)
        for kind in type(optimizer).__mro__
        if kind not in Optimizer.__mro__
        for name, value in vars(kind).items()
        if type(value) in (bool, int, float, complex, str, tuple)
    ]

    def moved() -> list[int]:
        return [
            i for i, generator in enumerate(generators) if not torch.equal(generator.get_state(), states[i])
        ]

    try:
        yield lambda: bool(moved()) or random.getstate() != pythons
    finally:
        for number in moved():  # others may be drawing from those that did not
            generators[number].set_state(states[number])
        random.setstate(pythons)
        if arrays is not None:
            arrays.set_state(numpys)
        for kind, name, value in counters:
            if vars(kind).get(name) is not value:
                setattr(kind, name, value)
