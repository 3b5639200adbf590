"""Runs one trial on one rank; all ranks of the trial run the same code.

A rank does the following, in this order:

1. It sets up the model, and compares it with a single process (:mod:`harness.reference_checks`).
2. It runs the warm-up steps, and waits for the other ranks at a barrier.
3. It runs the timed steps, and waits at a second barrier.  Validations and comparisons between these steps are not
   timed, and their messages are not counted.
4. It validates a last time, probes the rate of the link, and measures the errors of codecs.

A step trains or, in workload ``generate``, decodes.  In workload ``rlhf`` a step generates, scores with frozen models
(the *judges*, which a second engine shards), and trains.  Each rank returns raw values, which
:mod:`harness.runs.merge_ranks` merges into the trial's record.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from harness.cluster import all_ranks
from harness.cluster.link import PROBES, measure_link
from harness.cluster.rank import Progress, Rank, counters, take_gpu
from harness.cluster.rank_processes import BACKENDS, Launch
from harness.errors import Refusal
from harness.measure import compute_alone, gpu_use, machine
from harness.measure.cpu_usage import ProcessorMeter
from harness.measure.peak_memory import device_in_use, forget_peak, peak_device, peak_rss
from harness.measure.step_clock import StepClock
from harness.measure.unsharded_loss import as_computed
from harness.records.memory_parts import sum_parts, without_training
from harness.records.sent_by_step import in_runs
from harness.records.training_faults import Checked, Spent
from harness.records.trial_record import (
    AdapterCounters,
    Alone,
    ChosenCodec,
    InterfaceCounters,
    LedgerRow,
    Memory,
    NodeUse,
    ProcessorUse,
    RankRecord,
    StepsSent,
    Validation,
)
from harness.reference_checks import muon_step
from harness.reference_checks.comparison import Compared, Comparison
from harness.strategies import optimizers
from harness.strategies.strategy import Books, Sharded, Strategy, prepare, shard_model
from harness.strategies.training_loop import TrainingLoop, collect
from harness.suites import folder
from harness.suites.peers import family_of
from harness.suites.suite import Suite
from harness.suites.trial import Trial
from harness.witness.check_costs import counted
from harness.witness.training_checks import TrainingChecks, watch_inputs, wrong_kernel
from harness.witness.witness_clock import Kind
from harness.workloads import models, trial_dataset
from harness.workloads.dataset import Dataset, draw
from harness.workloads.generation import Counts, Generator
from harness.workloads.preset_parameters import shape_of
from harness.workloads.rank_batches import Batches, ExperienceBatch, RankBatches, batches_of
from harness.workloads.reinforcement import Judges, actor_of, judges_of
from impl import ops
from impl.codecs.codec import Raw
from impl.codecs.own_rows import decoded_sha256
from impl.comm import method_calls
from impl.comm.wire import TIMEOUT_SECONDS
from impl.plan.traffic import Event, Sent


@dataclass(frozen=True, slots=True)
class Assignment:
    """The trial that a rank has to run, with options for the run; the argument of :func:`run`."""

    trial: Trial
    probe_bytes: int | None  # size of the message that probes the link; None for no probe
    folder: Path = field(default_factory=folder.current)  # folder to which a suite's paths are relative


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank measured in a trial, and what was predicted for this rank.

    :mod:`harness.runs.merge_ranks` merges the outcomes of all ranks into the trial's record.  Fields without a comment
    are explained in :class:`~harness.records.trial_record.Record`.
    """

    record: RankRecord
    validations: list[Validation]
    # Messages of the timed steps as ``impl.plan.traffic`` predicts them; None if another engine trains (a peer).
    predicted: list[LedgerRow] | None
    # For a policy with a schedule: bytes of each step as ``impl.plan.traffic`` predicts them.
    predicted_by_step: list[StepsSent]
    unpredicted: list[str]  # purposes, such as "weights", of messages that cannot be predicted
    # What the node's interface sent in the timed steps, without evaluations; only the node's first rank has it.
    sent: InterfaceCounters | None
    # What the node's InfiniBand and RoCE adapters sent in the timed steps; only the node's first rank has it.
    adapters: AdapterCounters | None
    probed: list[float]  # rates of the link into this rank's node in Mbit/s, one for each probe
    compared: Compared  # comparisons with a single process and with exact values
    checked: Checked  # what the rank noted in each step, for later checks
    ran: dict[str, Any]  # facts on what ran, such as backend and versions
    units: list[tuple[str, int, int]]  # each unit's name, elements, and elements with padding
    parameters: int  # elements of the model
    machine_use: NodeUse | None
    decoded: list[str]  # SHA-256 of the tokens of each generation, warm-ups included
    spent: ProcessorUse | None  # CPU seconds in the timed steps; None if there may be several machines
    chosen: list[ChosenCodec]  # codecs that a bit budget chose; the same on all ranks


def run(rank: Rank, assignment: Assignment) -> Outcome:
    """Run a trial on this rank, in the default process group, and return what this rank measured.

    Raises:
        Refusal: If the trial cannot run.  Some causes raise another exception of
            :data:`harness.cluster.rank_processes.REFUSALS`, such as a CodecError.
    """
    folder.find_from(assignment.folder)
    return TrialRun(rank, assignment).run()


_WAITED: Final = ("forward", "backward", "generate", "score")  # parts of a step that wait for messages
WORKS: Final = {work.__name__: work for work in (run, measure_link)}
"""Functions that a node's supervisor may run on its ranks, by the name in a command."""


def admit_of(suite: Suite) -> Callable[[Any, Launch], Any]:
    """Return a function that checks each command from node 0 before this node carries it out.

    A rank imports the modules that its trial names.  The check makes sure that these names come from this node's own
    suite file, and not from another process.

    The function gets the command's argument and its :class:`~harness.cluster.rank_processes.Launch`, and returns the
    argument to use:

    - If the argument is an :class:`Assignment`, its trial is replaced by the same trial of ``suite``, with the number
      of the repeat that the command gave.  The assignment's folder is replaced by this node's folder.
    - Any other argument is returned unchanged.

    The function raises a Refusal if ``suite`` does not have this trial, or has no trial that uses the command's
    transport.

    Args:
        suite: The suite as this node has read it from its own file.
    """
    own = {trial.id: trial for trial in suite.combinations}
    transports = {trial.cluster.transport for trial in suite.combinations}
    backends = {BACKENDS.get(transport, transport) for transport in transports}

    def admit(argument: Any, launch: Launch) -> Any:
        if launch.backend not in backends:
            raise Refusal(
                f"transport {launch.backend!r} is not in this node's suite file: copy node 0's file here"
            )
        if not isinstance(argument, Assignment):
            return argument
        repeat, wanted = argument.trial.repeat, argument.trial.model_copy(update={"repeat": 0})
        if (trial := own.get(wanted.id)) is None:
            raise Refusal(
                f"trial {argument.trial.id} is not in this node's suite file: copy node 0's file here"
            )
        return replace(argument, trial=trial.model_copy(update={"repeat": repeat}), folder=folder.current())

    return admit


class TrialRun:
    """A trial as it runs on one rank; the constructor sets the trial up, and :meth:`run` runs it."""

    def __init__(self, rank: Rank, assignment: Assignment) -> None:
        trial = assignment.trial
        self.rank, self.assignment, self.trial = rank, assignment, trial
        self.device = device_of(trial, rank)
        self.data = RankBatches(trial, rank.rank, self.device, _shared_dataset(trial, rank))
        torch.manual_seed(trial.seed)
        with self.device:
            actor = actor_of(trial) if trial.workload == "rlhf" else None
            judges = None if actor is None else judges_of(trial, actor)
            model = models.of_trial(trial) if actor is None else actor
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        batches: Batches = self.data
        # The sharded actor is compared on batches that a single process has generated.
        if judges is not None:
            batches = collect(trial, self.data, model, judges, rank=rank.rank, index=0, clock=StepClock())
        own = trial.own_method is not None or trial.own_gather is not None
        if own and rank.fail is not None and rank.mesh is None:
            method_calls.watch(min(TIMEOUT_SECONDS, trial.timeout_seconds / 4), rank.fail)
        with rank.open_link():
            self.comparison = Comparison(trial, model, batches, rank)
            self.alone = self._compute_alone(model, "before")
            trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
            # Inputs are not watched with DeepSpeed, which wraps the model's forward pass, nor in generations, which
            # train nothing.
            watched = trial.workload != "generate" and family_of(trial.strategy) != "deepspeed"
            read = watch_inputs(model) if watched else None
            self.strategy: Strategy = prepare(trial, model, rank, self.device)
            policy, wire = trial.resolved_policy(), self.strategy.wire
            self.judges: Sharded | None = None  # sharded by the actor's policy; they use the actor's wire
            if judges is not None and wire is not None and policy is not None:  # both exist, as suites ensure
                self.judges = shard_model(trial, judges, wire, policy)
            if policy is not None and (why := ops.warning_of(self.device)) is not None:
                text = f"{why}; the slower PyTorch reference is used instead"
                rank.report(Progress("set-up", text=text))
            self.comparison.before_training(self.strategy)
        self.loop = TrainingLoop(trial, self.strategy, self.data, self.device)
        self.loop.collect = None if judges is None else partial(self._collect, judges)
        self.judge_events: list[Event] = []  # the judges' passes, for ``impl.plan.traffic``
        optimizer, engine = self.loop.optimizer, self.strategy.zero
        self.loop.checks = checks = TrainingChecks(trial, self.data, rank.rank, optimizer, read, zero=engine)
        self.checks, self.checked, self.witness = checks, checks.checked, self.loop.clock.witness
        self.checked.trainable, self._read = trained, read
        if (zero := self.strategy.zero) is not None:
            checks.matrix = muon_step.watch(trial, zero, self.loop.optimizer)
            compare = self.comparison.compare_drawn_step
            checks.compare = partial(compare, strategy=self.strategy, zero=zero)
        # All ranks built the same model.  From here on, each rank draws random numbers of its own, as for dropout.
        torch.manual_seed(draw(f"{trial.seed}/{rank.rank}/torch", 2**63))
        self.checked.random = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
        if policy is not None:
            codecs = (*policy.codecs, *(policy.owned if trial.optimizer.orthogonalises else ()))
            coded = any(not isinstance(codec, Raw) for codec in codecs)
            self.checked.encodes = coded or policy.own_reduce is not None  # a user's own reduction may encode
            with counted(self.checked.costs, "kernels"):
                self.checked.kernel = wrong_kernel(codecs, self.device)
        self.events = self.loop.events
        self.events += self.comparison.events
        self.generator = self._generator() if trial.workload == "generate" else None
        self.validations: list[Validation] = []
        # For a policy with a schedule: bytes sent in training before the first step, then until the end of each step;
        # and the number of events (passes) before the first step.
        self.scheduled, self.sent_until = (
            policy is not None and bool(policy.schedule),
            list[tuple[int, int]](),
        )
        self.events_before = 0
        # Peak memory before the latest comparison.  Comparisons may hold more memory, which is not counted.
        self.peak_rss = 0
        # Checks, evaluations and comparisons belong to no step, so the bytes that they send must be subtracted.  These
        # bytes are known from three sources: the ledger (booked), the node's network interfaces and adapters (counted),
        # and the transports that carried the messages (moved).
        self.booked_untimed = self._booked() or 0
        self.own_interface = rank.port.holder is not None  # whether only this node's ranks use its interface
        # The ports of this node's InfiniBand adapters, if NCCL may use them.
        self.ports = (
            self._sent_by_port() if trial.cluster.transport == "nccl" and trial.cluster.nodes > 1 else {}
        )
        self.counted_untimed = self._count()
        self.moved_untimed = self._moved_so_far()

    def run(self) -> Outcome:
        """Run the whole trial, from warm-up on, and return what this rank measured."""
        trial, total = self.trial, self.trial.warmup + self.trial.steps
        forget_peak(self.device)
        for index in range(trial.warmup):
            self.rank.report(Progress("warm-up", index, trial.warmup))
            self.step(index)
        all_ranks.barrier()
        booked, foreseen = self.strategy.books(), self._predicted()
        counted = -self._counted_training()
        # With a launcher there may be several machines.
        one_machine = trial.cluster.launcher == "local" and trial.measures_time
        processors = ProcessorMeter()
        with self._sampling() as sampled:
            moved, earlier = self._moved(), time.monotonic()
            begin, before = self.witness.turn("between"), dict(self.witness.spent)
            begun = time.monotonic()
            for index in range(trial.warmup, total):
                self.rank.report(Progress("steps", index - trial.warmup, trial.steps))
                self.step(index)
            ended = time.monotonic()
            laps = self.witness.turn("between") - begin
            self._note_clock(before, laps, (ended - begun, time.monotonic() - earlier))
            self.checked.carried, self.checked.booked = (self._moved() - moved).tolist()
        all_ranks.barrier()
        spent = processors.use() if one_machine else None
        counted += self._counted_training()
        if trial.validate_every is not None and all(v.step != total for v in self.validations):
            self._validate(total)
        ledger, copied = _since(booked, self.strategy.books())
        predicted, copied_formula = _since(foreseen, self._predicted())
        engine, formula = self.strategy.memory(trial, self.loop.optimizer)
        if self.generator is not None:
            engine, formula = without_training(engine), without_training(formula)
        if self.judges is not None:
            judge_engine, judge_formula = self.judges.memory(trial, self.loop.optimizer)
            for parts in (judge_engine, judge_formula):  # the actor's wire carries the judges' messages too
                parts.pop("messages", None)
            engine, formula = sum_parts(engine, judge_engine), sum_parts(formula, judge_formula)
        memory = Memory(
            engine=engine,
            formula=formula,
            peak_rss=max(self.peak_rss, peak_rss()),
            peak_device=peak_device(self.device),
            device_in_use=device_in_use(self.device),
            copied=copied,
            copied_formula=copied_formula,
        )
        self.alone += self._compute_alone(None, "after")
        probed = list[float]()
        if (nbytes := self.assignment.probe_bytes) is not None:
            self.rank.report(Progress("probe"))
            message = nbytes, PROBES, trial.cluster.transport, trial.cluster.launcher
            probed = measure_link(self.rank, message)
        with self.rank.open_link():
            self.comparison.after_steps(self.strategy)
        ran = self._ran()
        self.strategy.close()
        units = [*self.strategy.units, *(() if self.judges is None else self.judges.units)]
        tx_bytes, tx_packets, by_adapters = counted.tolist()
        adapters = AdapterCounters(node=self.rank.node, tx_bytes=by_adapters, ports=list(self.ports))
        sent = InterfaceCounters(node=self.rank.node, tx_bytes=tx_bytes, tx_packets=tx_packets)
        outcome = Outcome(
            record=RankRecord(
                rank=self.rank.rank,
                node=self.rank.node,
                local=self.rank.local,
                steps=self.loop.clock.steps,
                ledger=ledger,
                memory=memory,
                tokens=[] if self.generator is None else self.generator.measured,
                alone=self.alone,
                sent_by_step=in_runs(self.sent_until),
            ),
            validations=self.validations,
            predicted=predicted,
            predicted_by_step=self._predicted_by_step(),
            unpredicted=list(self.strategy.unpredicted),
            sent=sent if self.own_interface and self.rank.first_of_node else None,
            adapters=adapters if self.ports and self.rank.first_of_node else None,
            probed=probed,
            compared=self.comparison.compared,
            checked=self.checked,
            ran=ran,
            units=[(unit.name, unit.numel, unit.padded) for unit in units],
            parameters=self.parameters,
            machine_use=next(iter(sampled), None),
            decoded=[] if self.generator is None else self.generator.sha256,
            spent=spent,
            chosen=[
                ChosenCodec(step=step, what=purpose, unit=unit, hop=hop, codec=str(codec), vnmse=vnmse)
                for step, purpose, unit, hop, codec, vnmse in self.strategy.decisions
            ],
        )
        return outcome if trial.measures_time else without_seconds(outcome)

    def _note_clock(self, before: dict[Kind, Spent], laps: float, passed: tuple[float, float]) -> None:
        """Copy the times that the witness clock has measured into ``checked``, the rank's notes for later checks.

        The witness clock (:mod:`harness.witness.witness_clock`) is a second clock, with which the recorded times are
        compared later.  It sorts a rank's time into kinds, such as ``step`` and ``check``.

        Args:
            before: The time of each kind until the first timed step began.
            laps: Seconds from the beginning of the first timed step to the end of the last, measured by the witness
                clock.  Validations in between are included.
            passed: The same span of time by ``time.monotonic()``, as (least seconds, most seconds).  There are two
                numbers because ``time.monotonic()`` was read both just before and just after each reading of the
                witness clock.
        """
        checked, witness = self.checked, self.witness
        checked.steps, checked.laps, checked.passed = witness.steps, laps, passed
        checked.between = witness.spent["between"] - before["between"]
        checked.checks = witness.spent["check"] - before["check"]
        checked.seconds = witness.spent["check"].seconds
        # The thread's sleep equals its waits for messages only if nothing else makes it sleep.  A rank also sleeps
        # while its GPU computes, and a user's model or optimizer may sleep.
        user_code = any(":" in name for name in (self.trial.model.name, self.trial.optimizer.name))
        checked.sleeps_counted = witness.counts_sleep and self.device.type == "cpu" and not user_code

    def _sampling(self) -> contextlib.AbstractContextManager[list[NodeUse]]:
        """Return a context manager that samples power and utilisation of this node's GPUs, on the node's first rank.

        On the node's other ranks, and in trials on the CPU, the context manager does nothing.
        """
        uuids = []
        if self.rank.first_of_node and self.device.type == "cuda" and self.trial.measures_time:
            first, count = self.device.index, torch.cuda.device_count()
            ranks = 1 if self.trial.strategy == "single" else self.rank.topology.ranks_per_node
            used = [(first + i) % count for i in range(ranks)]  # ranks may share a GPU
            uuids = [f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in used]
        return gpu_use.sampling(self.rank.node, uuids)

    def _compute_alone(self, model: nn.Module | None, when: Literal["before", "after"]) -> list[Alone]:
        """Time training steps of the unsharded model, which send no messages, and return the timings.

        Returns an empty list if the trial takes no such timings.

        Args:
            model: The unsharded model; None to make a new model of the trial.
            when: Whether this is before or after the trial's timed steps.
        """
        trial = self.trial
        count = compute_alone.samples(trial.steps * trial.accumulation, when)
        timed = trial.workload == "train" and trial.strategy != "single" and trial.measures_time
        if not timed or not count:
            return []
        self.rank.report(Progress("compute alone"))
        if model is None:
            with torch.random.fork_rng(), self.device:
                model = models.of_trial(trial)
        return compute_alone.measure(
            as_computed(trial, model),
            next(batches_of(self.data)),
            partial(optimizers.of_share, trial.optimizer, optimizers.owned_shapes(trial, model)),
            ranks=trial.topology().world,
            when=when,
            count=count,
        )

    def step(self, index: int) -> None:
        """Run one step of the trial's workload."""
        if self.generator is None:
            self._compare(index)
            self._train(index)
            return
        self.strategy.forget_gathered()
        self.events.append("forgotten")
        self.generator.run(self.strategy.model.eval(), index=index, warmup=index < self.trial.warmup)
        self.events += ["evaluate"] * self.trial.generate.tokens

    def _collect(self, judges: Judges, index: int, clock: StepClock) -> ExperienceBatch:
        """Generate and score the batch on which this rank trains in step ``index`` of workload ``rlhf``.

        ``judges`` are the frozen models that score.  ``clock`` adds up the seconds of both parts.
        """
        self.events += ["evaluate"] * self.trial.generate.tokens
        self.judge_events.append("evaluate")
        model, rank = self.strategy.model, self.rank.rank
        return collect(self.trial, self.data, model, judges, rank=rank, index=index, clock=clock)

    def _predicted(self) -> Books:
        """Return the predicted messages, and copies between host and device, of all passes that this rank has run."""
        sent, copied = self.strategy.predicted(self.events)
        if self.judges is not None:
            sent = (sent or {}) | (self.judges.predicted(self.judge_events)[0] or {})  # no unit is in both
        return sent, copied

    def _predicted_by_step(self) -> list[StepsSent]:
        """Predict the bytes that each step sends, for a policy with a schedule.

        Returns an empty list if the policy has no schedule, or if some of the messages cannot be predicted.
        """
        if not self.scheduled or self.strategy.unpredicted:
            return []
        events = self.events
        return in_runs(
            self.strategy.predicted_steps(events[: self.events_before], events[self.events_before :])
        )

    def _generator(self) -> Generator:
        """Return the object that decodes text for workload ``generate``.

        Its prompts are the beginnings of the sequences in this rank's batches of the first step.
        """
        generate = self.trial.generate
        prompts = [tokens[:, : generate.prompt] for tokens, _ in batches_of(self.data)]
        shape = shape_of(self.trial.model)
        return Generator(torch.cat(prompts), generate.tokens, shape.layers, self._counts, self.device)

    def _counts(self) -> Counts:
        """Return (seconds, bytes between nodes, bytes inside nodes) of this rank so far.

        The seconds are the time that this rank waited for messages.  The bytes are from the ledger, our engine's own
        count of the messages that the rank sent.  If a peer decodes (a library such as FSDP2, with its own messages),
        all three values are None.
        """
        ledger, exposed = self.strategy.ledger(), self.strategy.exposed_seconds()
        if ledger is None:
            return exposed, None, None
        nbytes = {"inter": 0, "intra": 0}
        for key, sent in ledger.items():
            nbytes[key.link] += sent.bytes
        return exposed, nbytes["inter"], nbytes["intra"]

    def _train(self, index: int) -> None:
        """Train one step, and validate if that is due."""
        if self._read is not None:
            self._read.clear()  # forget the inputs of passes that rehearsed the step
        if self.scheduled and not self.sent_until:
            self.sent_until, self.events_before = [self._sent_in_training()], len(self.events)
        waited = self.strategy.exposed_seconds()
        stepped = self.loop.step(index, warmup=index < self.trial.warmup)
        if not stepped.done:
            self.comparison.forget_step(index)
        if self.scheduled and stepped.done:  # otherwise an overflow: the schedule goes on with the next step
            self.sent_until.append(self._sent_in_training())
        zero, matrix = self.strategy.zero, self.checks.matrix
        if zero is not None and matrix is not None and matrix.drawn == index:
            with self._untimed():
                wrong = muon_step.compare_step(self.trial, index, zero, matrix)
            self.checked.wrong = self.checked.wrong or wrong
        if waited is not None and (now := self.strategy.exposed_seconds()) is not None:
            self.checked.waited = (self.checked.waited or 0.0) + now - waited
        if self.trial.validate_every and (index + 1) % self.trial.validate_every == 0:
            self._validate(index + 1)

    def _validate(self, step: int) -> None:
        """Compute the loss on the validation split after ``step`` steps, and add it to the list ``validations``."""
        self.rank.report(Progress("validation", step, self.trial.warmup + self.trial.steps))
        inter, losses = self._inter_bytes(), list[float]()
        with self._untimed(), torch.no_grad():
            self.strategy.model.eval()
            for batch in self.data.validation:
                losses.append(float(self.strategy.model(*batch)))
                self.events.append("evaluate")
            self.strategy.model.train()
            self.strategy.forget_gathered()  # otherwise the next pass would find gathered weights and send less
            self.events.append("forgotten")
        loss = math.fsum(losses) / len(losses)
        self.checked.validated.append(sum(losses) / len(losses))
        share = Validation(step=step, loss=loss, train_seconds=self.loop.seconds, inter_bytes=inter)
        self.validations.append(share)

    @contextlib.contextmanager
    def _untimed(self) -> Iterator[None]:
        """Exclude the body of ``with`` from all measurements of time and messages.

        Messages in the body are not limited to the link's rate.  All ranks must call this method.
        """
        with self.witness.lap("apart"):
            self.counted_untimed -= self._count()
            self.moved_untimed -= self._moved_so_far()
            with self.rank.open_link():
                yield
            self.moved_untimed += self._moved_so_far()
            self.counted_untimed += self._count()
            all_ranks.barrier()  # the next step begins on all ranks at once

    def _count(self) -> NDArray[np.int64]:
        """Read what this node's network devices have sent so far; all ranks must call this method.

        Returns:
            (3,): bytes of the node's network interface, packets of this interface, and bytes of the InfiniBand and RoCE
            adapters that NCCL may use.  The node's first rank reads these counters; the other ranks return zeros.  The
            interface is read only if it is in a network namespace, where no other program uses it; else its two counts
            are 0.
        """
        count = np.zeros(3, np.int64)
        nccl = self.trial.cluster.transport == "nccl" and self.trial.cluster.nodes > 1
        if self.own_interface or nccl:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # otherwise messages could still be sent
            all_ranks.barrier()
            if self.rank.first_of_node and self.own_interface:
                count[:2] = counters(str(self.rank.port.interface))
            if self.rank.first_of_node and self.ports:
                count[2] = sum(self._sent_by_port().values())
            all_ranks.barrier()  # otherwise other ranks of the node could already send their next messages
        return count

    def _sent_by_port(self) -> dict[str, int]:
        """Return, for each InfiniBand or RoCE port of this node that NCCL may use, the bytes that it has sent so far.

        The result is a dict from the port to its bytes.  It is empty in a network namespace and with a shaped
        interface, where NCCL uses sockets.
        """
        if self.rank.port.holder is not None or self.rank.port.shaped_mbit is not None:
            return {}  # NCCL is told to use sockets
        return machine.hca_sent_bytes([name for name in self.rank.port.hcas.split(",") if name])

    def _counted_training(self) -> NDArray[np.int64]:
        """Return what this node's network devices have sent in training so far, as an array like :meth:`_count`.

        What was sent during setup, checks and evaluations is left out.
        """
        return self._count() - self.counted_untimed

    def _moved(self) -> NDArray[np.int64]:
        """Return the bytes that this rank has sent in training so far, by two counts, as an array (2,).

        The first count is made by the transports that carry the messages, the second by the ledger of our engine.  They
        are compared later, to find messages that the ledger misses.
        """
        return self._moved_so_far() - self.moved_untimed

    def _moved_so_far(self) -> NDArray[np.int64]:
        """Return the bytes that this rank has sent since its set-up, by two counts, as an array (2,).

        The first count is made by the transports that carry the messages, the second by the ledger of our engine.
        Messages outside of training are included.  Both counts are 0 if another engine trains (a peer).
        """
        wire, ledger = self.strategy.wire, self.strategy.ledger()
        booked = sum(sent.bytes for sent in ledger.values()) if ledger else 0
        return np.array([0 if wire is None else wire.carried, booked])

    def _inter_bytes(self) -> int | None:
        """Return the bytes that training has sent between nodes so far, to be summed over ranks.

        - With a ledger (our engine's own count of a rank's messages): the bytes that this rank sent.
        - Without a ledger, if each node has a network namespace: the bytes that the node's interface counted, on the
          node's first rank; 0 on its other ranks.
        - Otherwise: 0 if the trial has a single node, else None.
        """
        if (booked := self._booked()) is not None:
            return booked - self.booked_untimed
        if self.own_interface:
            return int(self._counted_training()[0])
        return 0 if self.rank.topology.nodes == 1 else None

    def _booked(self) -> int | None:
        """Return the bytes that this rank has sent to other nodes, without evaluations, by our engine's own count.

        This count is the ledger.  Returns None if a peer trains (a library such as DDP), since its messages are in no
        ledger.
        """
        if (ledger := self.strategy.ledger()) is None:
            return None
        return sum(s.bytes for key, s in ledger.items() if key.link == "inter" and key.phase != "evaluate")

    def _sent_in_training(self) -> tuple[int, int]:
        """Return (bytes to other nodes, bytes inside the node) that this rank has sent so far, without evaluations.

        Our engine's ledger has counted the bytes.  Both numbers are 0 if a peer trains (a library such as DDP), which
        has no ledger.
        """
        nbytes = {"inter": 0, "intra": 0}
        for key, sent in (self.strategy.ledger() or {}).items():
            nbytes[key.link] += sent.bytes if key.phase != "evaluate" else 0
        return nbytes["inter"], nbytes["intra"]

    def _compare(self, index: int) -> None:
        """Check the messages of step ``index`` before the step begins, if it is one of the steps to be checked.

        Neither the time nor the messages of the check are counted.
        """
        comparison, zero = self.comparison, self.strategy.zero
        drawn = zero is not None and index == comparison.drawn
        if self.strategy.wire is None or not (drawn or index in comparison.steps):
            return
        self.peak_rss = max(self.peak_rss, peak_rss())
        with self._untimed():
            begin = time.perf_counter()
            if zero is not None and drawn:
                comparison.before_drawn_step(index, self.strategy, zero, self._count)
            else:
                comparison.before_step(index, self.strategy, self.checks)
            comparison.compared.seconds += time.perf_counter() - begin
        self.events.append("forgotten")
        forget_peak(self.device)

    def _ran(self) -> dict[str, Any]:
        """Return facts on what ran: backend, device, versions, and digests of corpus, codecs and kernels."""
        policy = self.trial.resolved_policy()
        digests = {} if policy is None else {str(codec): decoded_sha256(codec) for codec in policy.own_codecs}
        kernels = ops.loaded_kernels(self.device)
        return {
            **self.strategy.describe(),
            "backend": all_ranks.backend(),
            "device": self.device.type,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "optimizer": type(self.loop.optimizer).__name__,
            "corpus_sha256": self.data.sha256,
            **({"own_codecs": digests} if digests else {}),
            **({"kernels_sha256": kernels} if policy and kernels else {}),
        }


def device_of(trial: Trial, rank: Rank) -> torch.device:
    """Return the device of a rank's tensors; a GPU becomes torch's current device.

    Raises:
        Refusal: If the machine has too few GPUs.
    """
    if rank.mesh is not None:
        return rank.mesh.device
    if trial.cluster.device == "cpu":
        return torch.device("cpu")
    return torch.device(take_gpu(rank, trial.cluster.launcher, trial.cluster.transport))


def _shared_dataset(trial: Trial, rank: Rank) -> Dataset | None:
    """Return the data set that rank 0 has loaded for all ranks that are threads; None for a rank that is a process.

    If ranks are threads, all ranks must call this function.
    """
    if rank.mesh is None:
        return None
    return all_ranks.gather_objects(trial_dataset.load(trial) if rank.rank == 0 else None)[0]


def without_seconds(outcome: Outcome) -> Outcome:
    """Return a copy of a rank's outcome without any times, for a rank that ran as a thread.

    Ranks that are threads take turns, so that a time measured on one rank includes the work of other ranks.
    """
    record, checked = outcome.record, outcome.checked
    nothing: dict[str, Any] = dict.fromkeys(("total", "forward", "backward", "optimizer"), 0.0)
    unknown = ("cpu_seconds", "generate", "score", *(f"exposed_{part}" for part in _WAITED))
    nothing |= dict.fromkeys(unknown)
    checked = replace(
        checked, steps=[], between=Spent(), checks=Spent(), seconds=0.0, costs={}, laps=0.0, passed=(0.0, 0.0),
        waited=None, sleeps_counted=False,
    )  # fmt: skip
    steps = [step.model_copy(update=nothing) for step in record.steps]
    tokens = [token.model_copy(update={"seconds": 0.0, "exposed": None}) for token in record.tokens]
    return replace(
        outcome,
        record=record.model_copy(update={"steps": steps, "tokens": tokens}),
        validations=[each.model_copy(update={"train_seconds": 0.0}) for each in outcome.validations],
        checked=checked,
        compared=replace(outcome.compared, seconds=0.0, costs={}),
    )


def _since(before: Books, now: Books) -> tuple[list[LedgerRow] | None, dict[str, int]]:
    """Return the messages and the copies between host and device that were counted from ``before`` to ``now``.

    Returns:
        Two values.  The first has the messages as rows of a ledger, with bytes and messages of each kind.  It is None
        for a peer (a library such as DDP), which keeps no ledger.  The second has the bytes that were copied between
        host and device, by direction and purpose.
    """
    copied: dict[str, int] = defaultdict(int)
    for key, nbytes in sorted(now[1].items()):
        copied[f"{key.direction} {key.purpose}"] += nbytes - before[1].get(key, 0)
    if now[0] is None:
        return None, dict(copied)
    pairs = [(key, sent, (before[0] or {}).get(key, Sent(0, 0))) for key, sent in sorted(now[0].items())]
    rows = [
        LedgerRow(**key._asdict(), bytes=sent.bytes - old.bytes, messages=sent.messages - old.messages)
        for key, sent, old in pairs
        if sent != old
    ]
    return rows, dict(copied)
