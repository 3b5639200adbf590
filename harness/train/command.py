"""``zeropp train``: the flags of the tutorials' launch lines.  torch is imported when it runs."""

from __future__ import annotations

import copy
import inspect
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import ValidationError
from typer import Option

from harness.cluster import interrupts
from harness.cluster.rank_processes import REFUSALS, Launch, LaunchError, run_in_place, run_ranks
from harness.errors import Refusal, visible
from harness.measure import machine
from harness.records.trial_record import wrong_field
from harness.runs.feasibility import check_writable, this_host
from harness.suites.trial import Cluster, Model, Optimizer, PolicyChanges, Trial
from harness.workloads.trial_dataset import check as check_data
from impl.checkpoint.commit import resolve
from impl.checkpoint.manifest import Manifest, read_manifest
from impl.deepspeed.config_to_policy import laid_out, recipe
from impl.deepspeed.keys import ZERO, DeepSpeedError, load
from impl.plan.shard_layout import PERSISTENT
from impl.plan.topology import Topology

if TYPE_CHECKING:
    from harness.train.loop import Job

MOST_LAYERS: Final = 10_000  # each takes time to be laid out
MOST: Final = 1_000_000_000  # steps, sequences of a rank, tokens of a sequence
LR: Final = 3e-4  # where neither flags nor the configuration say one, or that says "auto"
MOST_WIDTH: Final = 1_000_000
_LENGTHS: Final = {"1.5b": 1024, "10b": 1024, "18b": 512}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The flags of ``zeropp train``; where one is None, the configuration or a default decides."""

    preset: Annotated[Literal["1.5b", "10b", "18b"] | None, Option(help="Shape of a tutorial.")] = None
    num_layers: Annotated[int | None, Option(min=1, max=MOST_LAYERS, help="Transformer blocks.")] = None
    hidden_size: Annotated[int | None, Option(min=1, max=MOST_WIDTH, help="Width.")] = None
    num_attention_heads: Annotated[int | None, Option(min=1, help="Heads; they divide the width.")] = None
    vocab_size: Annotated[
        int | None, Option(min=256, max=MOST, help="Rows of the embedding; data are bytes.")
    ] = None
    seq_length: Annotated[int | None, Option(min=1, max=MOST, help="Tokens of a sequence.")] = None
    batch_size: Annotated[
        int | None, Option(min=1, max=MOST, help="Sequences of a rank in a micro-batch.")
    ] = None
    checkpoint_activations: Annotated[
        bool,
        Option(
            "--checkpoint-activations",
            "--deepspeed-activation-checkpointing",
            help="Run blocks again in the backward pass instead of keeping their activations.",
        ),
    ] = False
    fp16: Annotated[bool, Option("--fp16", help="Compute in fp16, with a loss scale.")] = False
    bf16: Annotated[bool, Option("--bf16", help="Compute in bf16.")] = False
    zero_stage: Annotated[int | None, Option(min=0, max=3, help="Of ZeRO.")] = None
    deepspeed_config: Annotated[
        Path | None,
        Option("--deepspeed_config", "--deepspeed-config", help="File in JSON; see docs/guide/deepspeed.md."),
    ] = None
    model_parallel_size: Annotated[int, Option(help="Only 1.")] = 1
    tensor_model_parallel_size: Annotated[int, Option(help="Only 1.")] = 1
    pipeline_model_parallel_size: Annotated[int, Option(help="Only 1.")] = 1
    nodes: Annotated[int | None, Option(min=1, help="Virtual nodes; under torchrun, its own.")] = None
    ranks_per_node: Annotated[int | None, Option(min=1, max=64, help="Ranks of each node.")] = None
    device: Annotated[Literal["cpu", "cuda"], Option(help="Where states and models lie.")] = "cpu"
    steps: Annotated[int, Option(min=1, max=MOST, help="Optimizer steps.")] = 10
    lr: Annotated[float | None, Option(min=0, help="Learning rate; else the configuration's, or 3e-4.")] = (
        None
    )
    corpus: Annotated[str, Option(help="stdlib, a file or a folder.")] = "stdlib"
    seed: Annotated[int, Option(min=0, max=2**63 - 1, help="Of weights and batches.")] = 0
    max_padding: Annotated[float | None, Option(min=0, help="Most padding of a unit, as a share; 0.2.")] = (
        None
    )
    save: Annotated[Path | None, Option(help="Folder of checkpoints: one after the last step.")] = None
    save_every: Annotated[
        int | None, Option("--save-every", "--save-interval", min=1, help="And one every so many steps.")
    ] = None
    keep: Annotated[int | None, Option(min=1, help="Checkpoints to keep, the newest.")] = None
    resume: Annotated[
        Path | None, Option("--load", help="A checkpoint, or a folder of them, to go on from.")
    ] = None
    plan: Annotated[bool, Option("--plan", help="Print the memory at each stage, and stop.")] = False

    def check(self) -> None:
        """Refuse flags that contradict each other, and files that cannot be read or written."""
        for name in ("model_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size"):
            if (size := getattr(self, name)) != 1:
                flag = f"--{name.replace('_', '-')}"
                raise Refusal(f"{flag} {size}: only 1: there is no tensor, model or pipeline parallelism")
        if self.save is None and (self.save_every or self.keep):
            raise Refusal(f"{'--save-every' if self.save_every else '--keep'}: where to? give --save FOLDER")
        if self.save is not None:
            check_writable(self.save, f"--save {self.save}:")
        if self.resume is not None:
            read_manifest(resolve(self.resume))


def train(**flags: Any) -> None:
    """Train a GPT by a DeepSpeed configuration, with the flags of its tutorials; print a line a step."""
    try:
        _train(Settings(**flags))
    except LaunchError as error:
        raise Refusal(f"{error} (log: {error.log})") from None
    except (DeepSpeedError, *REFUSALS) as error:
        raise Refusal(str(error)) from None


train.__signature__ = inspect.signature(Settings, eval_str=True)  # type: ignore[attr-defined]  # for typer


def _train(settings: Settings) -> None:
    from harness.train.loop import Job

    topology, torchrun = _topology(settings.nodes, settings.ranks_per_node)
    settings.check()
    config = {} if settings.deepspeed_config is None else load(settings.deepspeed_config)
    try:
        trial = _trial(settings, config, topology, torchrun=torchrun)
    except (Refusal, ValueError) as error:
        reason = wrong_field(error) if isinstance(error, ValidationError) else error
        raise Refusal(f"{settings.deepspeed_config or 'flags'}: {reason}") from None
    trial = _with_room(trial)
    excess = _plan(trial, speaks=not torchrun or os.environ.get("RANK", "0") == "0")
    if settings.plan:
        return
    if excess:
        raise Refusal(f"too big for memory: {excess}; the table says what other stages need")
    check_data(trial)
    _run(Job(trial, settings.resume, settings.save, every=settings.save_every, keep=settings.keep))


def _trial(settings: Settings, config: Mapping[str, Any], topology: Topology, *, torchrun: bool) -> Trial:
    """The trial that flags and configuration ask for."""
    table = _configured(settings, config)
    configured = recipe(table, topology=topology, steps=settings.steps)
    adam = {"type": "AdamW", "lr": LR if settings.lr is None else settings.lr}
    if configured.optimizer is not None:
        adam = asdict(configured.optimizer) | {"betas": list(configured.optimizer.betas)}
    elif configured.peak is not None:
        adam["lr"] = configured.peak
    sequence = settings.seq_length or _LENGTHS.get(settings.preset or "", 128)
    sizes = {
        "layers": settings.num_layers,
        "width": settings.hidden_size,
        "heads": settings.num_attention_heads,
        "vocab": settings.vocab_size,
    }
    arguments: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
    return Trial(
        strategy="recipe",
        deepspeed_config=json.dumps(table),
        policy=PolicyChanges(max_padding=settings.max_padding),
        cluster=Cluster(
            nodes=topology.nodes,
            ranks_per_node=topology.ranks_per_node,
            link="real" if torchrun else "none",
            device=settings.device,
            transport="nccl" if settings.device == "cuda" else "shm",
            launcher="torchrun" if torchrun else "local",
        ),
        model=Model(name=f"gpt-{settings.preset or 'small'}", arguments=arguments),
        corpus=settings.corpus,
        sequence=sequence,
        tokens_per_rank=(configured.micro_batch or 1) * sequence,
        accumulation=configured.accumulation,
        optimizer=Optimizer(name=adam.pop("type"), arguments=adam),
        clip=configured.clip,
        activation_checkpointing=settings.checkpoint_activations,
        steps=settings.steps,
        warmup=0,
        seed=settings.seed,
        threads=max(1, machine.cores() // topology.world),
    )


def _with_room(trial: Trial) -> Trial:
    """The trial, whose units may be as large as a module that is larger than its configuration's limit.

    DeepSpeed gathers such a module too, whatever ``stage3_max_live_parameters`` says.
    """
    from harness.workloads import models
    from impl.engine.unit_planning import drafts_of, find_blocks

    policy = trial.resolved_policy()
    assert policy is not None  # noqa: S101  # a recipe is one
    if not (most := policy.memory.largest_unit):
        return trial
    with models.unfilled():
        model = models.build(trial.model, trial.sequence)
    blocks, unlimited = find_blocks(model, most=most), replace(policy.memory, largest_unit=0)
    drafts = drafts_of(model, blocks, None, replace(policy, memory=unlimited))
    sizes = [sum(spec.numel for spec in draft.specs) for draft in drafts if draft.name != PERSISTENT]
    if max(sizes, default=0) <= most:
        return trial
    changes = trial.policy.model_copy(update={"largest_unit": max(sizes)})
    return trial.model_copy(update={"policy": changes})


def steps_text(manifest: Manifest) -> str:
    """The steps of a checkpoint's run, counted as in its log: a step that an overflow skipped counts."""
    scale, extra = manifest.loss_scale, manifest.extra
    done = manifest.step + (0 if scale is None else scale["skipped"])
    if isinstance(extra, dict) and extra.keys() == {"seed", "corpus", "sequence", "steps"}:
        done = int(extra["steps"])  # of `zeropp train`, since another loss scale restarts its own count
    skipped = done - manifest.step
    return f"step {done}" + (f", {skipped} of them skipped for an overflow" if skipped else "")


def _configured(settings: Settings, config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration, completed by the flags; refused if one contradicts it."""
    table, lr = copy.deepcopy(dict(config)), settings.lr
    flags: list[tuple[str, tuple[str, ...], Any]] = [
        ("--zero-stage", (ZERO, "stage"), settings.zero_stage),
        ("--fp16", ("fp16", "enabled"), settings.fp16 or None),
        ("--bf16", ("bf16", "enabled"), settings.bf16 or None),
        ("--batch-size", ("train_micro_batch_size_per_gpu",), settings.batch_size),
    ]
    if isinstance(adam := table.get("optimizer"), dict):
        params = adam.get("params")
        auto = isinstance(params, dict) and params.get("lr") == "auto"
        flags.append(("--lr", ("optimizer", "params", "lr"), LR if auto and lr is None else lr))
    for flag, (*sections, key), value in flags:
        if value is None:
            continue
        place = table
        for section in sections:
            if place.get(section) is None:
                place[section] = {}
            place = place[section]
            if not isinstance(place, dict):
                raise Refusal(f"{flag}, but the configuration's {section} = {json.dumps(place)}")
        other = place.get(key)
        if other not in (None, "auto", value):
            raise Refusal(f"{flag} {json.dumps(value)}, but the configuration's {key} = {json.dumps(other)}")
        place[key] = value
    return table


def _topology(nodes: int | None, ranks_per_node: int | None) -> tuple[Topology, bool]:
    """The topology, and whether torchrun has started the ranks."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # as torch.distributed.is_torchelastic_launched()
        return Topology(nodes or 1, ranks_per_node or 2), False
    world = int(os.environ["WORLD_SIZE"])
    local = ranks_per_node or (max(1, world // nodes) if nodes else int(os.environ["LOCAL_WORLD_SIZE"]))
    topology = Topology(nodes or max(1, world // local), local)
    if topology.world != world:
        raise Refusal(f"torchrun started {world} ranks, --nodes x --ranks-per-node are {topology}")
    return topology, True


def _plan(trial: Trial, *, speaks: bool) -> str | None:
    """Print the finding of each key and the need of each stage; returns why it does not fit, or None."""
    from harness.train.memory_table import in_words, needs, table, too_large
    from harness.workloads import models
    from impl.engine.unit_planning import plan_units
    from impl.errors import ZeroError
    from impl.plan.shard_layout import PaddingError

    configured, policy = trial.recipe(), trial.resolved_policy()
    assert policy is not None  # noqa: S101  # a recipe is one
    topology, cuda = trial.topology(), trial.cluster.device == "cuda"
    with models.unfilled():
        model = models.build(trial.model, trial.sequence)
    try:
        configured = laid_out(configured, plan_units(model, topology, policy))
        needed = needs(model, policy, trial)
    except (ValueError, ZeroError) as error:
        option = f": --max-padding {error.needed:.2f}" if isinstance(error, PaddingError) else ""
        raise Refusal(f"{error}{option}") from None
    finally:
        for finding in configured.findings if speaks else ():
            print(visible(str(finding)))
    if speaks:
        numel = sum(parameter.numel() for parameter in model.parameters())
        size = f"{numel / 1e9:.4g} B" if numel >= 1e9 else f"{numel / 1e6:.4g} M"
        print(
            f"{size} parameters on {topology.world} ranks ({topology}): Adam's states are "
            f"{in_words(needed[0].adam)}, and {in_words(needed[1].adam)} on each rank from stage 1 on"
        )
        print(table(needed, policy.stage, cuda=cuda), flush=True)
    ranks = topology.world if trial.cluster.launcher == "local" else int(os.environ["LOCAL_WORLD_SIZE"])
    return too_large(needed[policy.stage], topology, this_host(), cuda=cuda, ranks=ranks)


def _run(job: Job) -> None:
    """Start the ranks, or be one, and print the progress of rank 0."""
    from harness.cluster.link import open_link
    from harness.train.loop import train as train_rank

    interrupts.take_over()
    trial, cluster = job.trial, job.trial.cluster
    torchrun = cluster.launcher == "torchrun"
    with open_link(cluster, f"{os.getpid():x}"[-6:]) as link:
        launch = Launch(
            topology=trial.topology(),
            ports=link.ports,
            paced_mbit=None,
            threads=trial.threads or 1,
            timeout_seconds=7 * 86400.0,
            log=Path(tempfile.gettempdir()) / f"zeropp-train-{os.getpid()}.log",
            backend="cpu:gloo,cuda:nccl" if cluster.device == "cuda" else "gloo",
        )
        start: Any = run_in_place if torchrun else run_ranks
        start(train_rank, job, launch, lambda progress: print(progress.text, flush=True))
