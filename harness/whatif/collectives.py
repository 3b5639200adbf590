"""Finds the collectives of one rank's step in its trace: operation, elements, type, group, and when they ran.

- **gloo**: the host's operation ``c10d::NAME`` issues a collective, and an event ``gloo:NAME`` on a thread of gloo
  shows when it ran.  Sizes are those of ``record_shapes=True``.  gloo does not say which process group it used, so a
  trace of several groups is refused.  gloo's reduce-scatter is an all-reduce on the wire.
- **NCCL**: a kernel whose arguments have ``Collective name``, sizes, ``dtype`` and ``Process Group Ranks``.

No torch.
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
_KINDS: Final[
    Mapping[str, Kind]
] = {  # by a part of the operation's name without underscores, the first that fits
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
_DTYPES: Final = {  # types of gloo's traces by the names that they have in NCCL's
    "float": "Float", "double": "Double", "c10::bfloat16": "BFloat16", "c10::half": "Half", "unsigned char": "Byte",
    "signed char": "Char", "int": "Int", "long int": "Long", "bool": "Bool", "c10::float8_e4m3fn": "Float8_e4m3fn",
    "c10::float8_e5m2": "Float8_e5m2",
}  # fmt: skip
_MOST: Final = 1 << 50  # elements of a collective
_GLOO_THREADS: Final = 2  # threads on which a gloo process group runs collectives
# The beginning of an NCCL kernel's name.  In traces that a prediction is written into, a kernel that computes is named
# after what it does and the user's module, whose name may be anything.
_NCCL: Final = re.compile(r"(void )?[\w:]*nccl", re.IGNORECASE)
_UNIT: Final = re.compile(r"FSDP::\S.* \((.*)\)$")
_WINDOW: Final = re.compile(r"FSDP::(pre_forward|post_forward|pre_backward) \((.*)\)$")
_DDP: Final = "DistributedDataParallel.forward"
_BACKWARD: Final = ("autograd::engine", "FSDP::pre_backward")
_OPTIMIZER: Final = "Optimizer.step"


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective as one rank saw it; times are in seconds."""

    kind: Kind
    elements: int  # of the whole buffer, that is, of all ranks' parts together
    item: float  # bytes of an element on the wire
    dtype: str  # type of an element by NCCL's traces, such as ``BFloat16``
    group: tuple[int, ...]  # the ranks that take part
    phase: Phase
    unit: str  # FSDP's module whose weights or gradients it carries; empty if the trace does not say
    issued: tuple[float, float]  # when the host's operation, or the launch of the kernel, began and ended
    ran: tuple[float, float]  # when this rank entered the collective, and when it left
    lag: float = (
        0.0  # seconds from its issue to its beginning, without the time in which it waited for its turn
    )
    blocking: bool = False  # whether the host waits for it at once
    as_all_reduce: bool = False  # a reduce-scatter that is an all-reduce on the wire
    kernel: Event | None = None  # NCCL's kernel; None with gloo

    @property
    def signature(self) -> tuple[Any, ...]:
        """The properties that are equal on all ranks of the group."""
        return self.kind, self.elements, self.item, self.group

    def wire_bytes(self) -> float:
        """Return the bytes that cross the busiest link of its ring one way."""
        size, turns = len(self.group), 2 if self.kind == "all_reduce" or self.as_all_reduce else 1
        whole = self.elements * self.item
        return whole if self.kind == "broadcast" else turns * whole * (size - 1) / size


@dataclass(frozen=True, slots=True)
class Marks:
    """Moments of one step that the trace names, in seconds."""

    backward: float  # first operation of the backward pass; infinite if there is none
    backward_end: float  # end of the last operation of autograd
    optimizer: float  # beginning of the optimizer's step; infinite if there is none
    units: tuple[Event, ...]  # FSDP's annotations that name a module
    in_ddp: bool  # whether the model is a DistributedDataParallel, which waits for all buckets after backward
    windows: tuple[
        tuple[float, str], ...
    ]  # (moment, FSDP's module that computes from then on); "" for the root
    passes: int  # forward passes in the step

    @classmethod
    def of(cls, step: Step) -> Marks:
        """Return the marks that the trace of a step shows."""
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
        """Return the phase of the step at a moment."""
        return "forward" if moment < self.backward else "backward" if moment < self.optimizer else "optimizer"

    def computing(self, moment: float) -> str:
        """Return FSDP's module that computes at a moment; empty for the root, or if there are no modules."""
        place = bisect.bisect_right(self.windows, (moment, "\uffff")) - 1
        return self.windows[place][1] if place >= 0 else ""

    def unit(self, moment: float) -> str:
        """Return the module of FSDP's innermost annotation around a moment; empty if there is none."""
        around = [event for event in self.units if event.begin <= moment <= event.end]
        match = _UNIT.match(max(around, key=lambda event: event.begin).name) if around else None
        return match[1] if match else ""


def find(trace: Trace, step: Step, marks: Marks) -> list[Collective]:
    """Return the collectives of one step, in the order in which they were issued; barriers are left out.

    Raises:
        Refusal: if the trace lacks a collective's name, type, shapes or ranks, has another kind of collective than
            :data:`Kind` lists, or has messages between two ranks.
    """
    on_gpu = any(_NCCL.match(event.name) for event in step.device)
    found = _nccl(trace, step, marks) if on_gpu else _gloo(trace, step, marks)
    for collective in found:
        if not 0 <= collective.elements < _MOST:
            raise Refusal(
                f"{trace.path}: step {step.number} has {collective.kind} of an impossible number of elements: write "
                "the trace again"
            )
    return found


def _kind(trace: Trace, name: str) -> Kind | None:
    """Return the kind of an operation's name; None for a barrier."""
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
                "trace with a newer torch"
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
                # So a prediction is written for a program over gloo (:mod:`harness.whatif.export`).
                as_all_reduce=kind == "reduce_scatter"
                and "allreduce" in kernel.name.lower().partition("(")[0],
                kernel=kernel,
            )
        )
    return sorted(found, key=lambda collective: collective.issued)


def _group(trace: Trace, facts: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ranks of an NCCL kernel's process group."""
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
        f"{trace.path}: the ranks of process group {facts.get('Process Group Name')!r} ({size} ranks) are not in the "
        "trace: trace with a newer torch"
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
            f"{trace.path}: step {step.number} issues {len(issued)} collectives, but gloo ran {len(ran)}: trace whole "
            "steps of a program in which each step waits for its collectives"
        )
    groups = {tuple(ranks) for ranks in trace.groups.values() if len(ranks) > 1}
    if issued and len(groups) > 1:
        raise Refusal(
            f"{trace.path}: has {len(groups)} process groups, and gloo's traces do not say which one a collective used"
            ": trace with NCCL, or with one group"
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
    """Return the most elements that one argument of an operation has; a list of tensors counts as one argument."""
    return max((_elements(shape) for shape in dims), default=0) if isinstance(dims, list) else 0


def _sum(dims: Any) -> int:
    return sum(map(_elements, dims)) if isinstance(dims, list) else 0


def _elements(shape: Any) -> int:
    """Return the elements of a shape, or of a list of shapes together; 0 for no shape."""
    if not isinstance(shape, list) or not shape:
        return 0
    if all(isinstance(size, int) for size in shape):
        return math.prod(shape)
    return sum(map(_elements, shape))


def copies_out(marks: Marks, unit: str, moment: float) -> float | None:
    """Return the first time after ``moment`` at which FSDP copies the gathered weights of ``unit`` to their places.

    The unit's all-gather must be complete by then.  Returns None if FSDP does not copy them after ``moment``.
    """
    begins = sorted(
        event.begin for event in marks.units if event.name == f"FSDP::all_gather_copy_out ({unit})"
    )
    place = bisect.bisect_left(begins, moment)
    return begins[place] if place < len(begins) else None
