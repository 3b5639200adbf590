"""Tests, with a few steps on small tensors, whether an optimizer is elementwise, so that it may step shards.

An optimizer of a sharded model gets 1-D pieces of parameters, which may be cut at any element.  The optimizer must
therefore be elementwise: it must step each element independently of all others.  To find out, copies of the optimizer
take the same steps on a whole tensor, on two pieces of this tensor, and on the same elements in other shapes.  If the
results differ, the optimizer is refused, since on shards it would be another algorithm.
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

# Elements of the whole tensor.  Both pieces have more than 4096, from which on 8-bit optimizers quantise states.
NUMEL: Final = 12288
CUT: Final = 5117  # the element at which the tensor is cut, which is no multiple of a quantisation block
SHAPES: Final = ((96, 128), (3, 4, 32, 32))  # further shapes of the whole tensor
STEPS: Final = 8
KEPT: Final = 2  # how many tensors of each parameter group are stepped, unless all are
# The gradients of successive steps are multiplied by these factors in turn.  They are small and large, so that an
# optimizer that clips gradients shows it, whatever its threshold.
_SIZES: Final = (1e-3, 1.0, 100.0)
_RATE: Final = 0.01  # replaces a learning rate of zero
# Tolerance, as a fraction of the distance that an element has moved.  It is above 0 because vectorised loops round
# their last elements differently.
_SLACK: Final = 1e-4

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)

# Classes that are not tested at the first step: those of torch, which a unit test tries with all options, and
# those that users vouch for.
ELEMENTWISE: Final[set[type[Optimizer]]] = {
    getattr(torch.optim, name)
    for name in (
        *("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax"),
        *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
    )
}


def elementwise(kind: type[AnyOptimizer]) -> type[AnyOptimizer]:
    """Declare that optimizers of class ``kind`` are elementwise, so that the engine does not test them.

    An elementwise optimizer steps each element of a tensor independently of all others, so it may step shards.  The
    declaration does not extend to subclasses.  The function returns ``kind``, and may be used as a decorator.
    """
    ELEMENTWISE.add(kind)
    return kind


def why_not(optimizer: Optimizer, *, closure: bool = False) -> str | None:
    """Return a text that says why ``optimizer`` must not step shards (1-D pieces of parameters); None if it may.

    The text continues a sentence that begins with the name of the optimizer's class, such as "is not elementwise:
    ...".  The optimizer, the attributes of its class and all random number generators are unchanged afterwards.

    Args:
        optimizer: the optimizer.  If it has states already, the test begins with copies of these states.
        closure: whether the optimizer's ``step()`` is called with a closure.
    """
    return _why_not(optimizer, closure=closure, every=False)


def _why_not(optimizer: Optimizer, *, closure: bool, every: bool) -> str | None:
    """Test copies of ``optimizer``, and return a text that says why it must not step shards; None if it may.

    A shard has 1-D pieces of parameters.

    If a step of a copy raises an error, the test is repeated with ``every=True``.  If a step raises an error again, and
    was called without a closure although the optimizer's ``step()`` takes one, the test is repeated once more with a
    closure.

    Args:
        optimizer: the optimizer.  If it has states already, the test begins with copies of these states.
        closure: whether the steps are called with a closure.
        every: whether a copy has a small tensor for every tensor of the optimizer.  If False, it has small tensors only
            for the first two tensors of each parameter group, which is faster.
    """
    wrong = "so on shards it would be another algorithm; use an elementwise optimizer, such as AdamW"
    task = _Task.draw()
    with _restored(optimizer) as drew:
        try:
            flat, low, high, *shaped = twins = [
                _Twin(optimizer, task, (NUMEL,), every=every),
                _Twin(optimizer, task, (CUT,), every=every),
                _Twin(optimizer, task, (NUMEL - CUT,), first=CUT, every=every),
                *(_Twin(optimizer, task, shape, every=every) for shape in SHAPES),
            ]
        except Exception as error:  # the code is a user's and may raise anything
            return _unknown(optimizer, f"copying it raised {raised(error)}")
        before, way = flat.weights(), torch.zeros_like(flat.weights())
        for number in range(STEPS):
            errors = [twin.step(number, closure=closure) for twin in twins]
            if any(errors):
                if not every:  # attributes of the optimizer may rely on all of its tensors
                    return _why_not(optimizer, closure=closure, every=True)
                if not closure and "closure" in inspect.signature(type(optimizer).step).parameters:
                    return _why_not(optimizer, closure=True, every=True)
                if errors[0] is not None and errors[3] is None:
                    return (
                        f"is not elementwise: on 1-D tensors, as shards are, its step raises {errors[0]}; use an "
                        "elementwise optimizer, such as AdamW"
                    )
                return _unknown(optimizer, f"its steps on small tensors raised {next(filter(None, errors))}")
            whole, pieces = flat.weights(), torch.cat([low.weights(), high.weights()], 1)
            way += (whole - before).abs()
            before = whole
            alike = [_alike(flat.options(), piece.options()) for piece in (low, high)]
            if not (_same(whole, pieces, way) and all(alike)):
                if drew():
                    return (
                        "is not elementwise: it draws random numbers, and draws other numbers for shards than for "
                        f"whole tensors{_way_out(optimizer)}"
                    )
                return (
                    "is not elementwise: its steps on two pieces of a tensor differ from those on the whole tensor, "
                    f"as if it used a norm or a mean of the tensor, {wrong}"
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
    return (
        "; if it steps each element independently of all others, declare this with "
        f"zeropp.elementwise({type(optimizer).__name__})"
    )


def _same(whole: Tensor, other: Tensor, way: Tensor) -> bool:
    """Return whether two tensors of weights, ``whole`` and ``other`` (K, N), are equal up to rounding.

    They have the weights of K parameters with N elements each.  ``way`` (K, N) is the distance that each element of
    ``whole`` has moved in all steps so far.  A difference counts as rounding if it is small compared to this distance,
    or to the element.
    """
    equal = (whole == other) | (whole.isnan() & other.isnan())
    near = (whole - other).abs() <= _SLACK * way + 1e-6 * whole.abs()
    return bool((equal | near).all())


def _alike(options: Tensor, others: Tensor) -> bool:
    """Return whether the options of two copies of an optimizer (:meth:`_Twin.options`) are equal up to rounding."""
    close = partial(torch.allclose, rtol=_SLACK, atol=0.0, equal_nan=True)
    return options.shape == others.shape and close(options, others)


def bare_step(kind: type[Optimizer]) -> Callable[..., Any]:
    """Return the function ``step`` of an optimizer class without the wrappers that torch has put around it.

    The wrappers call the hooks that are registered for the steps of optimizers, and import torch's compiler.  The
    function without wrappers does neither.
    """
    step: Any = kind.step
    while hasattr(step, "__wrapped__") and step.__globals__["__name__"] == Optimizer.__module__:
        step = step.__wrapped__
    return step  # type: ignore[no-any-return]


class _Task(NamedTuple):
    """The problem on which optimizers are tried: initial weights, and a rule for the gradients of ``STEPS`` steps.

    In step i the gradient is ``slopes[i]``.  If steps are called with a closure, it is ``slopes[i] + bowl * weights``.
    """

    start: Tensor  # (N,) initial weights of many sizes; every eighth is 0, where the smallest change shows
    slopes: Tensor  # (STEPS, N), whose mean over steps is not 0, as in training
    bowl: Tensor  # (N,) second derivatives of the loss

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
    """Copies an optimizer, and takes trial steps with the copy.

    The copy steps *probes*: small parameters in place of the optimizer's tensors.  All probes of one copy have the
    shape ``shape`` and the same initial values: the initial weights of ``task``, from element ``first`` on.  ``every``
    says whether there is a probe for every tensor of the optimizer (:func:`_copy`).
    """

    def __init__(
        self, optimizer: Optimizer, task: _Task, shape: tuple[int, ...], *, first: int = 0, every: bool
    ) -> None:
        self.shape, part = shape, slice(first, first + math.prod(shape))
        self._slopes = task.slopes[:, part].view(STEPS, *shape)
        self._bowl = task.bowl[part].view(shape)
        self._optimizer, self._probes = _copy(optimizer, task.start[part].view(shape), part, every=every)

    def weights(self) -> Tensor:
        """Return the weights of all probes (small parameters) as (K, n) fp32 in host memory: K probes with n elements
        each.
        """
        return torch.stack([probe.detach().flatten().float().cpu() for probe in self._probes])

    def options(self) -> Tensor:
        """Return all numbers among the options of the copy's parameter groups, (M,) fp64.

        The options of two copies are compared too, because some optimizers adapt numbers among their options in
        training.
        """
        groups = self._optimizer.param_groups
        numbers = [value for group in groups for value in group.values() if isinstance(value, int | float)]
        return torch.tensor(numbers, dtype=torch.float64, device="cpu")

    def step(self, number: int, *, closure: bool) -> str | None:
        """Take step ``number``, counted from 0.

        Returns the error that the step raised, as one line; None if it raised no error.
        """

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
        except BaseException as error:  # the code is a user's and may raise anything, SystemExit too
            return raised(error)
        return None


def _copy(optimizer: Optimizer, start: Tensor, part: slice, *, every: bool) -> tuple[Any, list[nn.Parameter]]:
    """Copy an optimizer; the copy steps *probes*, which are small parameters in place of the optimizer's tensors.

    Returns the copy and the list of probes.  The copy has the optimizer's options, attributes and states, except that a
    learning rate of 0 is replaced by a positive one.

    Args:
        optimizer: the optimizer.
        start: the initial values of each probe, in the shape of a probe.
        part: which elements of a tensor with ``NUMEL`` elements a probe has.  If a state of the optimizer has a value
            for each element, this state is repeated or cut to ``NUMEL`` elements; the probe's state is the slice
            ``part`` of the result.
        every: whether the copy has a probe for every tensor of the optimizer.  If False, it has probes only for the
            first two tensors of each parameter group.
    """
    probes: list[nn.Parameter] = []
    copies: dict[int, Any] = {}  # by id of the original, as in the memo of copy.deepcopy()
    sizes: set[torch.Size] = set()  # shapes of the optimizer's tensors
    tensors: dict[int, nn.Parameter] = {}  # probes by id of the tensor that they replace

    def cut(tensor: Tensor) -> Tensor:
        """Return the state of a probe (small parameter), made from ``tensor``, the state of one of the optimizer's
        tensors.
        """
        values = tensor.detach().flatten()[:NUMEL]
        if not values.numel():
            return torch.zeros(start.shape, dtype=tensor.dtype, device=tensor.device)
        repeated = values.repeat(-(-NUMEL // values.numel()))[part]
        return repeated.view(start.shape).clone()

    def copied(value: Any) -> Any:
        """Return a copy of ``value``, with probes (small parameters) in place of the optimizer's tensors.

        ``value`` is an attribute, an option or a state of the optimizer, or a part of an attribute, option or state.
        """
        if id(value) in copies:
            return copies[id(value)]
        result: Any
        if isinstance(value, Optimizer):  # the given optimizer, or another optimizer inside it
            result = copies[id(value)] = object.__new__(type(value))
            for name, attribute in vars(value).items():
                hooks = name.startswith("_optimizer_") and name.endswith("_hooks")
                if name != "step":  # a scheduler's wrapper, which would step the given optimizer
                    result.__dict__[name] = OrderedDict() if hooks else copied(attribute)
        elif type(value) in (Tensor, nn.Parameter) and value.shape in sizes:
            result = copies[id(value)] = cut(value)
        elif isinstance(value, dict):
            result = copies[id(value)] = copy.copy(value)
            result.clear()
            for key, entry in value.items():
                new = tensors.get(key) if type(key) is int else None  # a state by the id of its tensor
                result[copied(key) if new is None else id(new)] = copied(entry)
            if "params" in result and result.get("lr", 1) == 0:  # a warm-up may begin with a rate of zero
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
    """Context for trial steps of copies of ``optimizer``; on leaving, it restores global state that the steps may
    change.

    The global state has two parts:

    - the states of the random number generators of torch, Python and NumPy;
    - those attributes of the optimizer's classes that are numbers, strings or tuples, such as a counter of steps.

    Yields a function that returns whether random numbers of torch or Python were drawn in the context.
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
        for number in moved():  # other threads may be drawing from the generators that did not move
            generators[number].set_state(states[number])
        random.setstate(pythons)
        if arrays is not None:
            arrays.set_state(numpys)
        for kind, name, value in counters:
            if vars(kind).get(name) is not value:
                setattr(kind, name, value)
