"""What a trial leaves behind: raw values, written once by rename, read tolerantly.

A record holds no means: every step's times, every loss, every byte counter stands as it was
measured; statistics belong to ``report``.  A failure is a record too.  The schema in words is
``results/README.md``; its history stands beside :data:`SCHEMA_VERSION`.  No torch.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from impl.deepspeed.recipe import Finding
from impl.plan.geometry import padding_share

# 1: first schema.
SCHEMA_VERSION: Final = 1

Model = TypeVar("Model", bound=BaseModel)
Phase = Literal["forward", "backward", "evaluate", "step", "probe"]
Link = Literal["inter", "intra"]  # between nodes, inside a node
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class RecordError(Exception):
    """A results file cannot be read or written; the message names the file and what to do."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LedgerRow(_Part):
    """Bytes that one rank sent, summed over the timed steps, self excluded.

    Attributes:
        phase: what the rank was doing: forward, backward, evaluate (also to decode a token), step
            (optimizer and norms).
        purpose: ``weights``, ``gradients`` or ``control``.
        unit: the unit's name; empty for control messages.
        hop: name of the axis.
        link: between nodes or inside a node.
        bytes: payload bytes.
        messages: messages, one per destination.
    """

    phase: Phase
    purpose: str
    unit: str
    hop: str
    link: Link
    bytes: int
    messages: int


class Step(_Part):
    """One optimizer step of one rank; times in seconds.

    ``forward`` and ``backward`` contain ``exposed_forward`` and ``exposed_backward``: the time
    the rank stood waiting for communication.  ``total`` runs from the step's begin to its end, and
    ``cpu_seconds`` is what all threads of the rank's process computed in it; None in records from before
    it was measured.
    """

    index: int
    warmup: bool
    total: float
    forward: float
    backward: float
    optimizer: float
    exposed_forward: float | None
    exposed_backward: float | None
    loss: float
    gradient_norm: float | None = None
    cpu_seconds: _Seconds | None = None


class Token(_Part):
    """One decoded token of each of a rank's sequences.

    Attributes:
        step: which generation, warm-ups included.
        warmup: whether that was one.
        index: of the token, from 0; the first also reads the prompt.
        seconds: that it took.
        exposed: of these, seconds that the rank stood waiting for communication.
        inter_bytes, intra_bytes: sent for it by this rank, between nodes and inside its node; None where
            there is no ledger.
    """

    step: int
    warmup: bool
    index: int
    seconds: float
    exposed: float | None
    inter_bytes: int | None
    intra_bytes: int | None


class Validation(_Part):
    """Loss on the fixed validation split after ``step`` optimizer steps.

    Attributes:
        step: optimizer steps taken, warm-ups included.
        loss: mean cross-entropy over all ranks, in nats per byte of text, byte to fill in, or image.
        train_seconds: wall-clock spent in steps so far.
        inter_bytes: bytes all ranks had sent between nodes in training so far (ledger, or the
            interfaces where there is no ledger).
    """

    step: int
    loss: float
    train_seconds: float
    inter_bytes: int | None


class Memory(_Part):
    """Bytes of one rank. ``engine``: what the engine owns, by name; ``formula``: the same
    parts as ``impl.plan.traffic.memory`` predicts; ``peak_rss``: of the process.  ``copied``: between host
    and device over the timed steps, by direction and purpose, for what is offloaded, and
    ``copied_formula`` as ``impl.plan.traffic.predict_copies`` predicts it.
    """

    engine: dict[str, int]
    formula: dict[str, int]
    peak_rss: int
    peak_device: int | None = None
    copied: dict[str, int] = {}
    copied_formula: dict[str, int] = {}


class RankRecord(_Part):
    """What one rank measured. ``ledger`` is None for strategies outside our wire; ``steps`` are of
    training and ``tokens`` of generation, one of them empty.
    """

    rank: int
    node: int
    local: int
    steps: list[Step]
    ledger: list[LedgerRow] | None
    memory: Memory
    tokens: list[Token] = []


class QuantisationError(_Part):
    """Error of one codec on one real tensor of the trial, from its frames.

    Attributes:
        purpose: weights or gradients.
        unit: the unit's name.
        codec: text form.
        vnmse: sum((decoded - x)^2) / sum(x^2).
        largest: max |decoded - x| / max |x|.
    """

    purpose: str
    unit: str
    codec: str
    vnmse: float
    largest: float


class LinkRecord(_Part):
    """The link between nodes, as asked for and as it was.

    Attributes:
        kind: namespaces, paced, none, or real (a network that exists).
        why: why this kind, when it was chosen by ``auto``.
        requested_mbit: Mbit/s per node and direction; None is unshaped.
        calibrated_mbit: achieved before the sweep, one value a repetition.
        probed_mbit: achieved right after the trial.
        message_bytes: size of one calibration message.
        details: burst, queue, MTU and the like.
    """

    kind: str
    why: str
    requested_mbit: float | None
    calibrated_mbit: list[float]
    probed_mbit: list[float]
    message_bytes: int
    details: dict[str, Any] = {}


class InterfaceCounters(_Part):
    """One node's network interface over the timed steps: bytes and packets it sent."""

    node: int
    tx_bytes: int
    tx_packets: int


class ProcessorUse(_Part):
    """What the processors that a trial may use did over its timed steps, evaluations between them included.

    Attributes:
        seconds: wall-clock, from begin to end.
        processors: how many.
        ranks: processor seconds of all ranks' processes.
        user, system: processor seconds of all programs, the ranks' among them, and of the kernel for them.
        interrupts: processor seconds of the kernel for devices and the network.
        steal: processor seconds that the machine's host gave to others.
    """

    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    processors: Annotated[int, Field(ge=1)]
    ranks: _Seconds
    user: _Seconds
    system: _Seconds
    interrupts: _Seconds
    steal: _Seconds


class Predicted(_Part):
    """What ``impl.plan.traffic`` says the timed steps send on each rank, and the exact equality."""

    ledgers: list[list[LedgerRow]]  # one list a rank
    equal: bool


class Failure(_Part):
    """Why there is no result. ``kind``: refused, crashed, timeout, memory (also what would not keep
    within the trial's limit, and was not run), interrupted, or wrong: it ran, and a check of what came
    out failed.
    """

    kind: str
    message: str
    log: str | None


class Record(_Part):
    """One trial: what defines it, where it ran, what came out.

    Attributes:
        suite: the suite's name.
        question: what the suite asks.
        trial: the trial's canonical JSON; its hash is ``id``.
        machine: facts about where it ran (``harness.measure.machine``).
        code: version, commit, and whether the checkout was changed.
        inputs: digests of what the trial names but does not hold (``harness.workloads.input_digests``).
        pool: hash of the facts that must agree before two records are pooled.
        ran: algorithms, transports, kernel backends and threads that really ran.
        findings: what became of each key of a DeepSpeed configuration, of strategy ``recipe``.
        order: position in the sweep's interleaved order.
        units: name, elements, padded elements of each unit.
        reference_loss: of a single process in fp32 on the first step's batches, before training and in
            evaluation mode.
        decoded_sha256: of the tokens that each rank decodes in every generation, in rank order.
        processor_use: of the machine on which all ranks ran; None where they may stand on several, where the
            system does not tell, and in records from before it was measured.
    """

    schema_version: int = SCHEMA_VERSION
    id: str
    suite: str
    question: str = ""
    trial: dict[str, Any]
    started: str
    finished: str
    order: int
    machine: dict[str, Any]
    code: dict[str, Any]
    inputs: dict[str, str] = {}
    pool: str
    failure: Failure | None
    ran: dict[str, Any] = {}
    findings: list[Finding] = []
    units: list[tuple[str, int, int]] = []
    parameters: int = 0
    link: LinkRecord | None = None
    ranks: list[RankRecord] = []
    interfaces: list[InterfaceCounters] | None = None
    validations: list[Validation] = []
    quantisation: list[QuantisationError] = []
    predicted: Predicted | None = None
    reference_loss: float | None = None
    decoded_sha256: list[str] = []
    power: list[dict[str, float]] | None = None
    processor_use: ProcessorUse | None = None

    @property
    def padding(self) -> float:
        """Of its units, as a share of the model's elements; 0 where it has no units."""
        return padding_share((numel, padded) for _, numel, padded in self.units)

    @property
    def settled(self) -> bool:
        """Whether running its trial again would only repeat it.

        One that was interrupted is run again, and so is one that was refused: it costs nothing, and
        the machine may allow it now.
        """
        return self.failure is None or self.failure.kind not in ("interrupted", "refused")

    @property
    def measured(self) -> bool:
        """Whether it holds anything that was measured; most failures do not."""
        return self.failure is None or bool(self.ranks)

    @property
    def answers(self) -> bool:
        """Whether it says what its suite asks: a result, or that its memory limit allows none."""
        if self.failure is None:
            return True
        foreseen = self.failure.kind == "memory" and not self.ranks and self.failure.log is None
        return foreseen and self.trial.get("memory_limit") is not None


def slowest_seconds(one: Record) -> list[float]:
    """Of each timed step the slowest rank's seconds, as the report counts them."""
    of_ranks = [[step.total for step in rank.steps if not step.warmup] for rank in one.ranks]
    return [max(totals) for totals in zip(*of_ranks, strict=True)]


def path_of(results: Path, record_id: str) -> Path:
    """Where the record of trial ``record_id`` lies."""
    return results / f"{record_id}.json"


def write(results: Path, record: Record) -> Path:
    """Write ``record`` whole or not at all; returns where.

    Raises:
        RecordError: if the folder cannot be written.
    """
    target = path_of(results, record.id)
    write_whole(target, record.model_dump_json(indent=1))
    return target


def write_whole(target: Path, text: str) -> None:
    """Write a file whole or not at all: temporary file, fsync, rename.

    Raises:
        RecordError: if its folder cannot be written.
    """
    folder = target.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, prefix=".", suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            Path(name).chmod(0o644)
            Path(name).replace(target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise RecordError(f"{target}: cannot write the record: {error.strerror or error}") from error


def read(path: Path) -> Record:
    """Read one record.

    Raises:
        RecordError: naming the file: not JSON, another schema version, or a missing field.
    """
    return read_as(Record, path, SCHEMA_VERSION)


def read_as(model: type[Model], path: Path, version: int) -> Model:
    """Read a file of ``model`` in schema ``version``.

    Raises:
        RecordError: naming the file: not JSON, another schema version, or a missing field.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path}: cannot read: {error}") from error
    except json.JSONDecodeError as error:
        raise RecordError(f"{path}: not a record: line {error.lineno}: {error.msg}") from error
    except (ValueError, RecursionError) as error:  # numbers or nesting beyond Python's limits
        raise RecordError(f"{path}: not a record: {error}") from None
    if not isinstance(data, dict) or "schema_version" not in data:
        raise RecordError(f"{path}: not a record: no schema_version")
    if data["schema_version"] != version:
        raise RecordError(
            f"{path}: schema version {data['schema_version']}, this program reads and writes "
            f"{version}; move the folder aside or use the version that wrote it"
        )
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise RecordError(f"{path}: not a record: {where}: {first['msg']}") from error


def read_all(results: Path) -> list[Record]:
    """All records of a folder, by order of running.

    Raises:
        RecordError: for any file that is not a record of this schema.
    """
    return sorted((read(path) for path in results.glob("*.json")), key=lambda r: (r.started, r.id))
