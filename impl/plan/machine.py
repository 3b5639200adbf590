"""A machine: what a cluster achieves in training, as measured or as published.

Pure: no torch.  :mod:`impl.plan.step_time` predicts steps from it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Final, Literal

from impl.codecs.codec import Codec

Overlap = Literal["none", "full", "schedule"]
BACKWARD: Final = 2.0  # a backward pass computes so many times what a forward pass does


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecCost:
    """Seconds of one processor for each element."""

    encode: float
    decode: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What one cluster achieves in training.

    Seconds are of one processor (a core, or a GPU); where more ranks than processors share a host, each takes
    so many times longer.

    Attributes:
        overlap: how the system hides messages.
        fixed: seconds of a step for each parameter of the model, whatever the batch.
        launch: further seconds for each unit of the model.
        per_token: further seconds for each parameter and each token of a rank.
        efficiency: share of an adapter's nominal rate that messages achieve, above 0 and at most 1.
        fewest, most: tokens of a rank between which ``fixed`` and ``per_token`` were measured.
        smallest, largest: parameters of models that they were measured with; 0 for any.
        latency: seconds from the end of sending a message to its arrival.
        inside: bytes a second that a rank sends to others inside its node; 0 for any number.
        unit: the engine's seconds for each unit in each half of a pass.
        element: the engine's seconds for each element of a unit in each half of a pass.
        message: the engine's seconds for each message that a rank sends.
        sent: further seconds for each of its bytes that goes to another node.
        optimizer: seconds for each element that a rank's optimizer steps.
        processors: of a host; 0 for one for each rank.
        emulated: all nodes are one host, whose processors they share.
        codecs: by their text, such as ``int4:128``.
        date, host: when and on what it was calibrated; empty for one that was published.
        spread: relative standard deviation of a step around its prediction.

    Raises:
        ValueError: naming the field that is negative, not finite, or out of its range.
    """

    name: str
    source: str
    fixed: float
    per_token: float
    efficiency: float
    fewest: float
    most: float
    smallest: float = 0.0
    largest: float = 0.0
    overlap: Overlap = "none"
    latency: float = 0.0
    inside: float = 0.0
    launch: float = 0.0
    unit: float = 0.0
    element: float = 0.0
    message: float = 0.0
    sent: float = 0.0
    optimizer: float = 0.0
    processors: int = 0
    emulated: bool = False
    spread: float = 0.0
    date: str = ""
    host: str = ""
    codecs: Mapping[str, CodecCost] = field(default_factory=dict)

    def __post_init__(self) -> None:
        numbers = {f.name: getattr(self, f.name) for f in fields(self)}
        for text, cost in self.codecs.items():
            numbers |= {f"codecs.{text}.encode": cost.encode, f"codecs.{text}.decode": cost.decode}
        for name, value in numbers.items():
            if isinstance(value, float | int) and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"machine {self.name}: {name} is {value}, not a finite number from 0 on")
        if not 0 < self.efficiency <= 1:
            raise ValueError(
                f"machine {self.name}: efficiency is {self.efficiency}, not above 0 and at most 1"
            )
        if self.fixed + self.per_token == 0:
            raise ValueError(f"machine {self.name}: fixed and per_token are both 0, so nothing takes time")
        if self.overlap not in ("none", "full", "schedule"):
            raise ValueError(
                f'machine {self.name}: overlap is "{self.overlap}", not "none", "full" or "schedule"'
            )

    def compute(self, parameters: float, tokens: float, units: int = 0) -> float:
        """Seconds of one processor for the passes over ``tokens`` of a model."""
        return units * self.launch + parameters * (self.fixed + tokens * self.per_token)

    def knows(self, parameters: float, tokens: float) -> bool:
        """Whether a model and a batch lie where the machine was measured."""
        sizes = self.largest == 0 or self.smallest <= parameters <= self.largest
        return sizes and self.fewest <= tokens <= self.most

    def times(self, codec: Codec) -> bool:
        """Whether a codec of this type and these bits was measured; true of machines without codecs."""
        word = str(codec).split(":")[0]
        return not self.codecs or any(known.split(":")[0] == word for known in self.codecs)

    def stretch(self, nodes: int, ranks_per_node: int) -> float:
        """How many times longer a rank takes because others share its host's processors."""
        ranks = nodes * ranks_per_node if self.emulated else ranks_per_node
        return max(1.0, ranks / self.processors) if self.processors else 1.0

    def cost(self, codec: Codec) -> CodecCost:
        """Of a codec, or of the measured one whose text is most alike: first its type, then its options."""
        text = str(codec)
        if not self.codecs:
            return _FREE
        return self.codecs[max(sorted(self.codecs), key=lambda known: _alikeness(known, text))]


_FREE: Final = CodecCost(encode=0.0, decode=0.0)


def _alikeness(known: str, text: str) -> tuple[bool, bool, int]:
    """How alike two codecs' texts are: type with bits, type, and how many options they share."""
    mine, theirs = known.split(":"), text.split(":")
    family = [re.sub(r"[0-9].*", "", words[0]) for words in (mine, theirs)]
    options = [{word for word in words[1:] if not word.isdigit()} for words in (mine, theirs)]
    return mine[0] == theirs[0], family[0] == family[1], -len(options[0] ^ options[1])
