"""Errors of gradients, losses, and net speed-ups, which need both losses and seconds."""

from __future__ import annotations

from dataclasses import dataclass

from docs.numbers.estimate import DocumentError, Estimate, alone, exact, form_of
from docs.numbers.records import derived, trials_of
from harness.records.confidence_intervals import Interval, geometric_interval, mean_interval
from report.data.text import number
from report.effects import effects, loss_verdicts
from report.effects.net_speed import NetSpeed, net_speeds
from report.effects.net_speed import against as net_speed_against


def error(suite: str, name: str, at: str = "") -> Estimate:
    """Return the error of gradients end to end (vNMSE).

    It is the geometric mean over trials of each trial's median over steps.
    """
    rows = derived(suite).sent_errors
    rows = rows[rows["purpose"].eq("gradients") & rows["hop"].isna() & rows["repeated"].eq(1)]
    trials = trials_of(suite, name, at)
    errors = trials["id"].map(rows.groupby("id")["vnmse"].median())
    if errors.isna().all():
        raise DocumentError(
            f"{suite}: the error of {name!r} at {at!r} was not measured: name a suite with measure_quantisation"
        )
    known = errors.notna()
    mean = geometric_interval(list(errors[known]))
    return Estimate(mean, number(3), f"the error (vNMSE) of {name} in {suite}")


def loss(suite: str, name: str, over: str = "", at: str = "") -> Estimate:
    """Return the final validation loss minus that of ``over``, by default the baseline, in nats, paired by seed."""
    setting = str(trials_of(suite, name, at)["setting"].iloc[0])
    base = over or next(iter(effects.beside(derived(suite)).get((setting, name), ())), "")
    losses = [loss_verdicts.by_seed(trials_of(suite, each, at)) for each in (name, base)]
    difference = mean_interval(list((losses[0] - losses[1]).dropna()))
    what = f"the loss of {name} minus {base}'s in {suite}"
    return Estimate(difference, form_of("+.4f"), what, equal=0.0, more_is_better=False)


def final_loss(suite: str, name: str, at: str = "") -> Estimate:
    """Return the final validation loss, as mean over seeds without an interval."""
    mean = float(loss_verdicts.by_seed(trials_of(suite, name, at)).mean())
    return Estimate(alone(mean), form_of(".3f"), f"the loss of {name} in {suite}")


def loss_share(suite: str, name: str, at: str = "") -> Estimate:
    """Return the difference of a final loss from the baseline's, as a share of the baseline's: ``+0.39 %``."""
    base = final_loss(suite, derived(suite).compared.baseline, at).interval.estimate
    difference = loss(suite, name, at=at).interval
    share = Interval(difference.estimate / base, difference.low / base, difference.high / base, difference.n)
    what = f"the loss of {name} as a share of the baseline's in {suite}"
    return Estimate(share, lambda value: f"{100 * value:+.2f} %", what, equal=0.0, more_is_better=False)


def _loss_row(suite: str, name: str, at: str) -> loss_verdicts.Row:
    setting = trials_of(suite, name, at)["setting"].iloc[0]
    rows = loss_verdicts.losses(derived(suite))
    return next(row for row in rows if row["configuration"] == name and row["setting"] == setting)


def loss_verdict(suite: str, name: str, at: str = "") -> str:
    """Return the verdict on a loss: ``within the margin``, ``beyond the margin``, ``inconclusive`` or ``no power``."""
    return str(_loss_row(suite, name, at)["verdict"])


def loss_margin(suite: str, name: str, at: str = "") -> Estimate:
    """Return the nats by which a loss may be higher than the baseline's and still be within the margin."""
    margin = float(_loss_row(suite, name, at)["margin"])
    return Estimate(exact(margin), number(3), f"the margin of {name} in {suite}")


def loss_in_steps(suite: str, name: str, at: str = "") -> Estimate:
    """Return how many steps earlier than ``name`` the baseline reaches the higher of the two final losses."""
    equal = _net_speed(suite, name, at).equal
    return Estimate(alone(equal.steps - equal.base_steps), form_of(".0f"), f"{name}'s loss in steps, {suite}")


def validated_at(suite: str) -> str:
    """Return the step after which final losses were measured: ``1,400``."""
    steps = {int(row["steps"]) for row in loss_verdicts.losses(derived(suite))}
    if len(steps) != 1:
        raise DocumentError(
            f"{suite}: losses were measured after {len(steps)} different numbers of steps: expected one, so write the "
            "number into the text"
        )
    return f"{steps.pop():,}"


def budgeted(suite: str, codec: str) -> Estimate:
    """Return the loss with codecs chosen unit by unit, minus the loss with the single ``codec``, such as ``int4``.

    The chosen codecs may send as many bytes as the single one.
    """
    names = [str(name) for name in derived(suite).trials["configuration"].unique()]
    chosen = [name for name in names if ", budget" in name and f"/{codec}:" in name.partition(", budget")[0]]
    if len(chosen) != 1:
        raise DocumentError(
            f"{suite}: {len(chosen)} configurations have a budget beside the codec {codec!r}: expected exactly one "
            f"among {'; '.join(names)}"
        )
    return loss(suite, chosen[0], over=f"{chosen[0].partition(', budget')[0]})")


@dataclass(frozen=True)
class Net:
    """The net speed-up of a configuration over its baseline, with the factors of this speed-up."""

    found: NetSpeed
    suite: str

    @property
    def reached(self) -> bool:
        """Whether the configuration reaches the baseline's final loss, or does not differ significantly."""
        return self.found.equal.reached

    @property
    def step(self) -> Estimate:
        """The speed-up of a step."""
        assert self.found.step is not None  # noqa: S101  # :func:`net_speed` has looked
        return self._estimate(self.found.step.speedup, "the speed-up of a step")

    @property
    def steps_ratio(self) -> Estimate:
        """The baseline's steps over the configuration's, to the higher of the two final losses."""
        return self._estimate(self.found.equal.ratio, "the ratio of steps")

    @property
    def total(self) -> Estimate:
        """The net speed-up to the higher of the two final losses."""
        return self._estimate(self.found.at_both, "the net speed-up")

    @property
    def loss(self) -> Estimate:
        """The configuration's mean loss at the end."""
        return Estimate(alone(self.found.equal.loss), form_of(".3f"), "the final loss")

    @property
    def base_loss(self) -> Estimate:
        """The baseline's mean loss at the end."""
        return Estimate(alone(self.found.equal.base), form_of(".3f"), "the baseline's final loss")

    @property
    def target(self) -> Estimate:
        """The higher of the two final losses."""
        return Estimate(alone(self.found.equal.target), form_of(".3f"), "the loss that both reach")

    @property
    def seeds(self) -> int:
        """The number of seeds that both the configuration and the baseline have."""
        return self.found.equal.ratio.n

    @property
    def where(self) -> str:
        """The setting of the seconds: ``2x2 ranks, 200 Mbit/s, 512 tokens/rank``."""
        assert self.found.step is not None  # noqa: S101  # :func:`net_speed` has looked
        return self.found.step.where

    def _estimate(self, value: Interval, what: str) -> Estimate:
        return Estimate(
            value, form_of(".2f"), f"{what} of {self.found.row['configuration']} in {self.suite}", 1.0
        )


def net_speed(suite: str, name: str, over: str = "", at: str = "") -> Net:
    """Return the net speed-up of a configuration, with seconds from the first source that has them for one setting.

    It is over the configuration ``over`` in the same setting, or else over the baseline.

    Raises:
        DocumentError: If the loss is not compared with a baseline's, if there are no seconds or no ratio of steps, or
            if ``over`` is of another setting.
    """
    found = _net_speed(suite, name, at)
    if over:
        base = trials_of(suite, over, at)
        if base["setting"].iloc[0] != found.row["setting"]:
            raise DocumentError(
                f"{suite}: {over!r} at {at!r} is of another setting than {name!r}: name a setting that has both"
            )
        found = net_speed_against(derived(suite), found.row, list(base["id"]))[0]
    if found.step is None or found.equal.why:
        raise DocumentError(
            f"{suite}: no net speed-up of {name!r}: {found.equal.why or 'no seconds of a step on a link with a rate'}"
        )
    return Net(found, suite)


def _net_speed(suite: str, name: str, at: str) -> NetSpeed:
    setting = trials_of(suite, name, at)["setting"].iloc[0]
    for each in net_speeds(derived(suite)):
        if (each.row["setting"], each.row["configuration"]) == (setting, name):
            return each
    raise DocumentError(
        f"{suite}: the loss of {name!r} is not compared with a baseline's: name a configuration of the contrast"
    )
