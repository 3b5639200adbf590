"""Records whose outcomes are known, and the heads of their pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from harness.records.trial_record import CommunicationError, Record
from harness.suites.trial import Cluster, Optimizer, PolicyChanges, Trial
from report.data.frames import frames_of
from report.data.metrics import derive
from report.verdicts import Verdicts, verdicts
from tests.report.records import changed, changed_steps, ending_at, record_of

NOISE = np.array([0.01, -0.01, 0.005, -0.005, 0.002, -0.002])
SEEDS = range(6)
AT_50 = Cluster(rate="50 Mbit/s")


def head_of(records: Sequence[Record], **fields: Any) -> Verdicts:
    """The head by records with these fields, in their order; a question that asks for nothing."""
    fields = {"question": "Is it so?"} | fields
    return verdicts(derive(frames_of([changed(r, order=order, **fields) for order, r in enumerate(records)])))


def timed(
    seconds: Mapping[str, float], repeats: Sequence[int] = SEEDS, cluster: Cluster = AT_50, **fields: Any
) -> list[Record]:
    """Records of trials by strategy, with steps of these seconds times a noise of 1 %."""
    return [
        changed_steps(
            record_of(Trial(strategy=strategy, repeat=repeat, cluster=cluster, **fields)),
            lambda _, step=step, repeat=repeat, strategy=strategy: {
                "total": step * (1 + NOISE[(repeat + len(strategy)) % 6])
            },
        )
        for repeat in repeats
        for strategy, step in seconds.items()
    ]


def validated(above: Mapping[str, float], seeds: int = 6, steps: int = 120, **fields: Any) -> list[Record]:
    """Records by gradients' codec ("" is ZeRO-3) that end so many nats above 2, with a noise of 0.01 nats."""
    return [
        ending_at(
            Trial(
                strategy="qgz" if codec else "zero3", seed=seed, steps=steps, warmup=0,
                policy=PolicyChanges(gradients=codec) if codec else PolicyChanges(),
                validate_every=steps // 3, cluster=AT_50, **fields,
            ),
            2 + 0.1 * seed + worse + (NOISE[seed % 6] if codec else 0.0),
        )
        for codec, worse in above.items()
        for seed in range(seeds)
    ]  # fmt: skip


def erring(errors: Mapping[str, float], seeds: int = 6) -> list[Record]:
    """Records by gradients' codec of qgZ with these errors end to end, times a noise of 1 %."""
    return [
        record_of(
            Trial(
                strategy="qgz", seed=seed, policy=PolicyChanges(gradients=codec), measure_quantisation=True,
                cluster=AT_50,
            ),
            communication_errors=[
                CommunicationError(
                    step=step, purpose="gradients", unit="", squared_error=error * (1 + NOISE[seed]),
                    squared_value=1.0, cosine=0.5,
                )
                for step in (0, 2)
            ],
        )
        for codec, error in errors.items()
        for seed in range(seeds)
    ]  # fmt: skip


def of_optimizers(worse: Mapping[str, float]) -> list[Record]:
    """Losses of ZeRO-3 and ZeRO++ under two optimizers, by how much ZeRO++ ends above ZeRO-3."""
    arguments: dict[str, dict[str, Any]] = {"AdamW": {"lr": 0.001}, "SGD": {"lr": 0.1, "momentum": 0.9}}
    return [
        ending_at(
            Trial(
                strategy=strategy, seed=seed, steps=120, warmup=0, validate_every=40, cluster=AT_50,
                optimizer=Optimizer(name=name, arguments=arguments[name]),
            ),
            2 + 0.1 * seed + (above + NOISE[(seed + len(name)) % 6]) * (strategy == "zeropp"),
        )
        for name, above in worse.items()
        for strategy in ("zero3", "zeropp")
        for seed in SEEDS
    ]  # fmt: skip


def scheduled(above: Mapping[str, float]) -> list[Record]:
    """Losses of ZeRO-3, and of ZeRO++ with schedules that send other gradients from a percentage of the steps on.

    ``above`` has by how much each ends above ZeRO-3, by the percentage; ``100`` is without a schedule.
    """
    from_percent = {
        percent: PolicyChanges()
        if percent == "100"
        else PolicyChanges(schedule=[{"until": f"{percent} %"}, {"gradients": "int8:256"}])
        for percent in above
    }
    run: dict[str, Any] = {"steps": 120, "warmup": 0, "validate_every": 40, "cluster": AT_50}
    trials = [(Trial(strategy="zero3", seed=seed, **run), 2 + 0.1 * seed) for seed in SEEDS]
    trials += [
        (
            Trial(strategy="zeropp", policy=policy, seed=seed, **run),
            2 + 0.1 * seed + above[percent] + NOISE[(seed + len(percent)) % 6] / 2,
        )
        for percent, policy in from_percent.items()
        for seed in SEEDS
    ]
    return [ending_at(trial, loss) for trial, loss in trials]


Configured = tuple[str, dict[str, Any], float]  # a strategy, changes of its policy, and a number


def trained(above: Sequence[Configured], **fields: Any) -> list[Record]:
    """Records that end so many nats above 2; the first has no noise, and the others have 0.01 nats."""
    run: dict[str, Any] = {"steps": 120, "warmup": 0, "validate_every": 40, "cluster": AT_50} | fields
    return [
        ending_at(
            Trial(strategy=strategy, policy=PolicyChanges(**policy), seed=seed, **run),
            2 + 0.1 * seed + worse + (NOISE[(seed + number) % 6] if number else 0.0),
        )
        for number, (strategy, policy, worse) in enumerate(above)
        for seed in SEEDS
    ]


def paced(seconds: Sequence[Configured], cluster: Cluster = AT_50) -> list[Record]:
    """Records of six repeats with steps of these seconds times a noise of 1 %."""
    return [
        changed_steps(
            record_of(
                Trial(strategy=strategy, policy=PolicyChanges(**policy), repeat=repeat, cluster=cluster)
            ),
            lambda _, step=step, noise=NOISE[(repeat + number) % 6]: {"total": step * (1 + noise)},
        )
        for number, (strategy, policy, step) in enumerate(seconds)
        for repeat in SEEDS
    ]
