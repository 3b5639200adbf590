"""What a page's head is about, as the modules of further sentences need it."""

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
    """The quantity of a page's head and its effects."""

    derived: Derived
    asked: Quantity  # that the suite asks for
    kind: str  # that the first sentence compares
    found: Mapping[str, Mapping[Key, Effect]]  # by quantity, the effect of each configuration in each setting
    effects_of: Callable[[Derived], dict[Key, Effect]]  # computes the effects of ``kind`` from records
    top: Difference  # that the first sentence is about

    @property
    def shown(self) -> str:
        """The quantity in the words of sentences: decoding has no steps."""
        return "tokens" if self.asked == "tokens" else self.kind

    @cached_property
    def key(self) -> Key:
        """The setting and the configuration of ``top``."""
        return next(key for key, effect in self.found[self.kind].items() if effect is self.top.effect)

    @cached_property
    def settings(self) -> list[str]:
        """The settings that have compared configurations, in the order of the page."""
        return list(dict.fromkeys(setting for setting, _ in self.compared(self.kind)))

    @cached_property
    def controls(self) -> set[str]:
        """The configurations with a control, which is a deliberate fault."""
        trials = self.derived.finished.drop_duplicates("configuration")
        pairs = zip(trials["configuration"], trials["id"], strict=True)
        return {
            name for name, identity in pairs if self.derived.frames.trial_of[identity].control is not None
        }

    def base_of(self, key: Key) -> str:
        """Return the baseline of a configuration; empty without one."""
        return next(iter(effects.beside(self.derived).get(key, ())), "")

    def compared(self, kind: str) -> dict[Key, Effect]:
        """Return the measured effects on a quantity of the contrast's configurations, without those of controls."""
        names = {*self.derived.compared.contrast} - self.controls
        found = self.found.get(kind, {})
        return {key: effect for key, effect in found.items() if key[1] in names and effect.size >= 0}

    def difference(self, kind: str, key: Key) -> Difference | None:
        """Return the difference of one configuration in one quantity; None if it was not measured.

        It has no notes: margins are those of the first sentence.
        """
        effect = self.compared(kind).get(key)
        if effect is None:
            return None
        return differences_of(self.derived, "step", self.found[kind], [key])[0]
