"""Finds the collectives in the trace of one rank's step: operation, elements, type, group, and when they ran.

- **gloo**: the host's operation ``c10d::NAME`` issues a collective, and an event ``gloo:NAME`` on a thread of gloo
  shows when the collective ran.  The trace has sizes if it was made with ``record_shapes=True``.  It does not say which
  process group a collective used, so a trace with several groups is refused.  gloo's reduce-scatter sends the messages
  of an all-reduce.
- **NCCL**: each collective is a kernel.  The kernel's arguments have ``Collective name``, sizes, ``dtype`` and
  ``Process Group Ranks``.

This module does not import torch.
"""

from __future__ import annotations

import bisect
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from harness.errors import Refusal
from harness.whatif.kineto import Event, Step, Trace

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"]
Phase = Literal["forward", "backward", "optimizer"]
# Kinds of collectives by a part of the operation's name.  The name is compared in lower case and without underscores.
# If it contains several of the parts, the first of them decides.
_KINDS: Final[Mapping[str, Kind]] = {
    "reducescatter": "reduce_scatter",
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
}
_ITEM_BYTES: Final = {
    "float": 4, "double": 8, "c10::bfloat16": 2, "c10::half": 2, "unsigned char": 1, "signed char": 1, "int": 4,
    "long int": 8, "bool": 1, "bfloat16": 2, "half": 2, "byte": 1, "char": 1, "long": 8,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "c10::float8_e4m3fn": 1, "c10::float8_e5m2": 1,
}  # fmt: skip
_DTYPES: Final = {  # names of types in NCCL's traces, by their names in gloo's traces
    "float": "Float", "double": "Double", "c10::bfloat16": "BFloat16", "c10::half": "Half", "unsigned char": "Byte",
    "signed char": "Char", "int": "Int", "long int": "Long", "bool": "Bool", "c10::float8_e4m3fn": "Float8_e4m3fn",
    "c10::float8_e5m2": "Float8_e5m2",
}  # fmt: skip
_MOST: Final = 1 << 50  # a collective with this many elements or more is refused as impossible
_GLOO_THREADS: Final = 2  # threads on which a gloo process group runs collectives
# The beginning of an NCCL kernel's name.  Only the beginning is matched: in traces that `zeropp whatif --export` wrote,
# kernels that compute are named after the user's modules, and such a name may contain "nccl" elsewhere.
_NCCL: Final = re.compile(r"(void )?[\w:]*nccl", re.IGNORECASE)
_UNIT: Final = re.compile(r"FSDP::\S.* \((.*)\)$")
_WINDOW: Final = re.compile(r"FSDP::(pre_forward|post_forward|pre_backward) \((.*)\)$")
_DDP: Final = "DistributedDataParallel.forward"
_BACKWARD: Final = ("autograd::engine", "FSDP::pre_backward")
_OPTIMIZER: Final = "Optimizer.step"


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of a traced step, as the trace of one rank shows it; times are in seconds."""

    kind: Kind
    elements: int  # elements of all ranks' parts together
    item: float  # bytes of an element on the wire
    dtype: str  # type of an element, as NCCL's traces name it, such as ``BFloat16``
    group: tuple[int, ...]  # the ranks that take part
    phase: Phase
    unit: str  # name of the FSDP module whose weights or gradients are sent; empty if the trace does not say
    issued: tuple[float, float]  # when the host's operation, or the launch of the kernel, began and ended
    ran: tuple[float, float]  # when this rank entered the collective, and when it left
    # Seconds from the collective's issue to its beginning, without the time in which gloo's threads were busy with
    # earlier collectives.
    lag: float = 0.0
    blocking: bool = False  # whether the host waits for the collective in the operation that issues it
    as_all_reduce: bool = False  # whether it is a reduce-scatter that sends the messages of an all-reduce
    kernel: Event | None = None  # NCCL's kernel; None with gloo

    @property
    def signature(self) -> tuple[Any, ...]:
        """The properties that must agree on all ranks of the group: kind, elements, bytes of an element, and ranks."""
        return self.kind, self.elements, self.item, self.group

    def wire_bytes(self) -> float:
        """Return the bytes that one rank sends to its neighbour if the collective runs as a ring.

        With N ranks and a whole tensor (the parts of all ranks together) of W bytes, the result is

        - ``2 W (N - 1) / N`` for an all-reduce, and for a reduce-scatter that sends the messages of an all-reduce
          (``as_all_reduce``);
        - ``W`` for a broadcast;
        - ``W (N - 1) / N`` for every other collective.
        """
        size, turns = len(self.group), 2 if self.kind == "all_reduce" or self.as_all_reduce else 1
        whole = self.elements * self.item
        return whole if self.kind == "broadcast" else turns * whole * (size - 1) / size


@dataclass(frozen=True, slots=True)
class Marks:
    """Times in one traced step, in seconds: when its phases begin and end, and when each FSDP module computes."""

    backward: float  # first operation of the backward pass; infinite if there is none
    backward_end: float  # end of the last operation of autograd
    optimizer: float  # beginning of the optimizer's step; infinite if there is none
    units: tuple[Event, ...]  # FSDP's annotations that name a module
    in_ddp: bool  # whether the model is a DistributedDataParallel, which waits for all buckets after backward
    # (moment, name of the FSDP module that computes from this moment on); the name is "" for the root
    windows: tuple[tuple[float, str], ...]
    passes: int  # forward passes in the step

    @classmethod
    def of(cls, step: Step) -> Marks:
        """Find when the phases of a step, such as its backward pass, begin and end, from the names of its events."""
        passes = [event for event in step.host if event.name.startswith(_BACKWARD)]
        units = [
            event for event in step.host if event.category == "user_annotation" and _UNIT.match(event.name)
        ]
        windows = []
        for event in units:
            if (match := _WINDOW.match(event.name)) is not None:
                leaves = match[1] == "post_forward"
                windows.append((event.end if leaves else event.begin, "" if leaves else match[2]))
        optimizers = [event.begin for event in step.host if event.name.startswith(_OPTIMIZER)]
        return cls(
            backward=min((event.begin for event in passes), default=math.inf),
            backward_end=max((event.end for event in passes), default=math.inf),
            optimizer=min(optimizers, default=math.inf),
            units=tuple(units),
            in_ddp=any(event.name.startswith(_DDP) for event in step.host),
            windows=tuple(sorted(windows)),
            passes=sum(event.name.startswith((_DDP, "FSDP::root_pre_forward")) for event in step.host),
        )

    def phase(self, moment: float) -> Phase:
        """Return the phase in which the step is at the time ``moment``: ``forward``, ``backward`` or ``optimizer``."""
        return "forward" if moment < self.backward else "backward" if moment < self.optimizer else "optimizer"

    def computing(self, moment: float) -> str:
        """Return the name of the FSDP module that computes at the time ``moment``, in seconds.

        Returns an empty text if the root module computes, or if the trace has no FSDP modules.
        """
        place = bisect.bisect_right(self.windows, (moment, "\uffff")) - 1
        return self.windows[place][1] if place >= 0 else ""

    def unit(self, moment: float) -> str:
        """Return the name of the module on which FSDP works at a moment, for example by gathering the weights.

        The name is taken from the annotation that FSDP has in progress at the moment.  If several nested annotations
        are in progress, the innermost is used.  Returns an empty text if no annotation is in progress.
        """
        around = [event for event in self.units if event.begin <= moment <= event.end]
        match = _UNIT.match(max(around, key=lambda event: event.begin).name) if around else None
        return match[1] if match else ""


def find(trace: Trace, step: Step, marks: Marks) -> list[Collective]:
    """Return the collectives of one step, in the order in which they were issued.  Barriers are left out.

    Raises:
        Refusal: if the trace lacks a collective's name, type, shapes or ranks, or if a prediction does not support the
            collective: a kind that :data:`Kind` does not list, messages between two ranks, or several groups of gloo.
    """
    on_gpu = any(_NCCL.match(event.name) for event in step.device)
    found = _nccl(trace, step, marks) if on_gpu else _gloo(trace, step, marks)
    for collective in found:
        if not 0 <= collective.elements < _MOST:
            raise Refusal(
                f"{trace.path}: step {step.number} has a collective ({collective.kind}) with an impossible number of "
                "elements: write the trace again"
            )
    return found


def _kind(trace: Trace, name: str) -> Kind | None:
    """Return the kind of the collective that an operation's name stands for.  Returns None for a barrier.

    Raises:
        Refusal: If a prediction does not support the operation.  The message names the file of ``trace``.
    """
    plain = name.lower().replace("_", "")
    if "barrier" in plain or "monitoredbarrier" in plain:
        return None
    for part, kind in _KINDS.items():
        if part in plain:
            return kind
    raise Refusal(
        f"{trace.path}: has {name}, but only all-gathers, reduce-scatters, all-reduces, all-to-alls and broadcasts can "
        "be predicted: trace a program without other collectives"
    )


def _item(trace: Trace, name: str) -> int:
    if (size := _ITEM_BYTES.get(name.lower())) is None:
        raise Refusal(
            f"{trace.path}: has a collective of elements of type {name!r}, whose size is not known: trace a program "
            "that sends numbers of another type"
        )
    return size


def _nccl(trace: Trace, step: Step, marks: Marks) -> list[Collective]:
    launched = {event.arguments.get("correlation"): event for event in step.launches}
    found = []
    for kernel in step.device:
        if not _NCCL.match(kernel.name):
            continue
        facts = kernel.arguments
        name = facts.get("Collective name")
        sizes = [facts.get(f"{way} msg nelems") for way in ("In", "Out")]
        if not isinstance(name, str) or not all(isinstance(size, int) for size in sizes):
            raise Refusal(
                f"{trace.path}: its NCCL kernels have no collective metadata ('Collective name', 'In msg nelems'): "
                "record the trace with a newer torch"
            )
        kind = _kind(trace, name)
        if kind is None:
            continue
        launch = launched[facts.get("correlation")]
        found.append(
            Collective(
                kind=kind,
                elements=max(size for size in sizes if isinstance(size, int)),
                item=_item(trace, str(facts.get("dtype"))),
                dtype=str(facts.get("dtype")),
                group=_group(trace, facts),
                phase=marks.phase(launch.begin),
                unit=marks.unit(launch.begin),
                issued=(launch.begin, launch.end),
                ran=(kernel.begin, kernel.end),
                # harness.whatif.export writes gloo's reduce-scatters as kernels with the name of an all-reduce.
                as_all_reduce=kind == "reduce_scatter"
                and "allreduce" in kernel.name.lower().partition("(")[0],
                kernel=kernel,
            )
        )
    return sorted(found, key=lambda collective: collective.issued)


def _group(trace: Trace, facts: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ranks of an NCCL kernel's process group.

    Args:
        trace: The trace, whose list of process groups is used if the kernel's own list of ranks is shortened.
        facts: The kernel's arguments.

    Raises:
        Refusal: If neither list has the ranks, and the group is not the group of all ranks.
    """
    try:
        ranks = json.loads(str(facts.get("Process Group Ranks")))
    except ValueError:  # torch shortens the list of a large group
        ranks = trace.groups.get(str(facts.get("Process Group Name")), ())
    size = facts.get("Group size")
    if isinstance(ranks, list) and ranks and all(isinstance(rank, int) for rank in ranks):
        return tuple(ranks)
    if size == trace.world:
        return tuple(range(trace.world))
    raise Refusal(
        f"{trace.path}: does not say which ranks form process group {facts.get('Process Group Name')!r} ({size} "
        "ranks): record the trace with a newer torch"
    )


def _gloo(trace: Trace, step: Step, marks: Marks) -> list[Collective]:
    issued, ran = list[tuple[Event, Kind]](), list[Event]()
    for event in step.host:
        if event.name.startswith("c10d::"):
            if event.name.startswith(("c10d::send", "c10d::recv")):
                raise Refusal(
                    f"{trace.path}: has messages between two ranks ({event.name}), which cannot be predicted: trace a "
                    "program without them"
                )
            if (kind := _kind(trace, event.name)) is not None:
                issued.append((event, kind))
        elif event.name.startswith("gloo:") and "barrier" not in event.name:
            ran.append(event)
    if len(issued) != len(ran):
        raise Refusal(
            f"{trace.path}: in step {step.number} the number of issued collectives is {len(issued)}, but gloo ran "
            f"{len(ran)}: trace whole steps of a program in which each step waits for its collectives"
        )
    groups = {tuple(ranks) for ranks in trace.groups.values() if len(ranks) > 1}
    if issued and len(groups) > 1:
        raise Refusal(
            f"{trace.path}: has {len(groups)} process groups, and gloo's traces do not say which group a collective "
            "used: trace with NCCL, or with one group"
        )
    group = next(iter(groups), tuple(range(trace.world)))
    found, ends = list[Collective](), [event.end for event in ran]
    for index, ((event, kind), run) in enumerate(zip(issued, ran, strict=True)):
        shapes = event.arguments.get("Input Dims"), run.arguments.get("Input Dims")
        types = [*(event.arguments.get("Input type") or ()), *(run.arguments.get("Input type") or ())]
        known = [str(name) for name in types if str(name).lower() in _ITEM_BYTES]
        dtype = known[0] if known else str(types[:1])
        # A tensor without dimensions has an empty shape, and one element.
        elements = max(_largest(shapes[0]), _sum(shapes[1]), min(1, len(known)))
        if not elements:
            raise Refusal(f"{trace.path}: {event.name} has no shapes: trace with profile(record_shapes=True)")
        queued = max(ends[max(0, index - _GLOO_THREADS) : index - _GLOO_THREADS + 1] or [0.0])
        concrete = event.arguments.get("Concrete Inputs") or ()
        found.append(
            Collective(
                kind=kind,
                elements=elements,
                item=_item(trace, dtype),
                dtype=_DTYPES.get(dtype.lower(), dtype),
                group=group,
                phase=marks.phase(event.begin),
                unit=marks.unit(event.begin),
                issued=(event.begin, event.end),
                ran=(run.begin, run.end),
                lag=max(0.0, run.begin - max(event.begin, queued)),
                blocking="False" in concrete,  # the only flag of these operations is asyncOp
                as_all_reduce=kind == "reduce_scatter" and "reduce" in run.name and "scatter" not in run.name,
            )
        )
    return found


def _largest(dims: Any) -> int:
    """Return the number of elements of the largest argument of an operation; 0 if ``dims`` is no list.

    ``dims`` has the shape of each argument.  If an argument is a list of tensors, the elements of all its tensors are
    added up.
    """
    return max((_elements(shape) for shape in dims), default=0) if isinstance(dims, list) else 0


def _sum(dims: Any) -> int:
    return sum(map(_elements, dims)) if isinstance(dims, list) else 0


def _elements(shape: Any) -> int:
    """Return the number of elements of a tensor's shape, or of all tensors in a list of shapes.

    Returns 0 for an empty list, and for everything that is no list.
    """
    if not isinstance(shape, list) or not shape:
        return 0
    if all(isinstance(size, int) for size in shape):
        return math.prod(shape)
    return sum(map(_elements, shape))


def copies_out(marks: Marks, unit: str, moment: float) -> float | None:
    """Return when FSDP begins to copy a unit's gathered weights out of the buffer of the all-gather.

    This moment shows when the unit's all-gather is waited for.  On a CPU, the host waits for the all-gather in this
    copy.  On a GPU, the kernels that the copy launches wait instead.

    Args:
        marks: Marks of the step, which hold FSDP's annotations.
        unit: Name of the FSDP module.
        moment: Copies before this time, in seconds, are ignored.

    Returns:
        The beginning of the first such copy in seconds; None if there is none.
    """
    begins = sorted(
        event.begin for event in marks.units if event.name == f"FSDP::all_gather_copy_out ({unit})"
    )
    place = bisect.bisect_left(begins, moment)
    return begins[place] if place < len(begins) else None
