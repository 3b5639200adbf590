"""Defines what the sentences at the head of a page are about: a quantity, and comparisons of configurations in it.

The modules of :mod:`report.further` write the sentences after the first from these facts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from harness.suites.answering_quantity import Quantity
from report.data.metrics import Derived
from report.effects import effects
from report.effects.effects import Effect, Key
from report.sentence import Difference, differences_of


@dataclass(frozen=True)
class Head:
    """What a page's head is about: a quantity, the comparisons in it, and the comparison in the first sentence.

    A comparison of one configuration with its baseline, in one quantity and one setting (cluster, model, batch and so
    on), is called an effect.
    """

    derived: Derived
    asked: Quantity  # the quantity that the suite asks for
    kind: str  # the quantity that the first sentence compares
    found: Mapping[str, Mapping[Key, Effect]]  # by quantity, the effect of each configuration in each setting
    effects_of: Callable[[Derived], dict[Key, Effect]]  # computes the effects of ``kind`` from records
    top: Difference  # the difference that the first sentence states

    @property
    def shown(self) -> str:
        """The quantity that sentences name: ``tokens`` if the suite asks for decoding speed; otherwise ``kind``.

        ``kind`` is the quantity that the first sentence compares.
        """
        return "tokens" if self.asked == "tokens" else self.kind

    @cached_property
    def key(self) -> Key:
        """The setting and the configuration that the page's first sentence is about, as (setting, configuration)."""
        return next(key for key, effect in self.found[self.kind].items() if effect is self.top.effect)

    @cached_property
    def settings(self) -> list[str]:
        """The hashes of the settings in which configurations are compared with a baseline, in the order of the page.

        A setting is the cluster, model, batch and so on.
        """
        return list(dict.fromkeys(setting for setting, _ in self.compared(self.kind)))

    @cached_property
    def controls(self) -> set[str]:
        """The names of configurations with a control, a fault made on purpose to show that the suite notices it."""
        trials = self.derived.finished.drop_duplicates("configuration")
        pairs = zip(trials["configuration"], trials["id"], strict=True)
        return {
            name for name, identity in pairs if self.derived.frames.trial_of[identity].control is not None
        }

    def base_of(self, key: Key) -> str:
        """Return the name of the baseline with which a configuration is compared; empty if there is none."""
        return next(iter(effects.beside(self.derived).get(key, ())), "")

    def compared(self, kind: str) -> dict[Key, Effect]:
        """Return the effects on the quantity ``kind`` of configurations that are compared with a baseline.

        An effect is the comparison of one configuration with its baseline; keys are (setting, configuration).  Effects
        that were not measured are left out, and so are configurations with a control (a fault made on purpose).
        """
        names = {*self.derived.compared.contrast} - self.controls
        found = self.found.get(kind, {})
        return {key: effect for key, effect in found.items() if key[1] in names and effect.size >= 0}

    def difference(self, kind: str, key: Key) -> Difference | None:
        """Return the difference of a configuration from its baseline in the quantity ``kind``, as a sentence needs it.

        ``key`` is (setting, configuration).  If ``kind`` is the loss, the difference's words do not mention the margin
        (by how much a loss may be higher), because the page's first sentence gives it.  Returns None if the difference
        was not measured, or if the configuration is not compared with a baseline.
        """
        effect = self.compared(kind).get(key)
        if effect is None:
            return None
        return differences_of(self.derived, "step", self.found[kind], [key])[0]
