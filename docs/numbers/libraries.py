"""Our configurations compared with the fastest settings of DDP, FSDP2 and DeepSpeed in the same types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from docs.numbers.estimate import DocumentError, Estimate
from docs.numbers.records import derived, in_setting, trials_of
from docs.numbers.speeds import pair_range, pairs_agree, seconds, speedup
from harness.suites.peers import family_of
from report.data.text import listed
from report.tables import peers


@dataclass(frozen=True)
class Beside:
    """One of our configurations compared with the fastest setting of a library in the same types."""

    ours: str
    types: str  # types in which both compute and send, ``bf16``; where ours sends others: ``bf16; ours sends int4``
    library: str
    setting: str  # the library's fastest configuration, as pages print it
    speedup: Estimate  # how many times as fast a step of ours is
    pairs: str  # the lowest and the highest speed-up of a pair
    # Whether ours is significantly faster or, with too few pairs for an interval, faster in every pair.
    faster: bool
    slower: bool  # whether ours is significantly slower or, with too few pairs, slower in every pair

    @property
    def text(self) -> str:
        """The speed-up with its interval, or with the range of its pairs if they are too few for an interval."""
        known = self.speedup.interval.known
        return str(self.speedup) if known else f"{self.speedup.value} (pairs {self.pairs})"


def _types(suite: str, at: str) -> dict[str, tuple[str, str]]:
    """Return for each configuration its library (empty for ours), and the types in which it is compared."""
    trials, trial_of = derived(suite).trials, derived(suite).frames.trial_of
    first = in_setting(trials, at).drop_duplicates("configuration")
    found = {}
    for name, identity in zip(first["configuration"], first["id"], strict=True):
        trial = trial_of[identity]
        library = peers.FAMILIES.get(family_of(trial.strategy) or "", "")
        found[str(name)] = library, peers.shared_types(trial)
    return found


def fastest_setting(suite: str, library: str, types: str, at: str = "") -> str:
    """Return the configuration with the shortest step among those of a library in ``types``, such as ``bf16``."""
    names = [name for name, of in _types(suite, at).items() if of == (library, types)]
    if not names:
        raise DocumentError(
            f"{suite}: no records of {library} in {types} at {at!r}: name another type or setting"
        )
    return min(names, key=lambda name: seconds(suite, name, at).interval.estimate)


def beside_libraries(suite: str, *ours: str, at: str = "") -> list[Beside]:
    """Compare each configuration of ours with the fastest setting of each library in the same types.

    The configuration and the setting compute in the same type and send the same type.  A configuration that quantises
    is compared with bf16, because libraries send at least 16 bits an element.  Configurations and libraries without
    records in a type are left out; :func:`not_beside` names them.
    """
    found, rows = _types(suite, at), []
    if not found.keys() & {*ours}:
        raise DocumentError(
            f"{suite}: no configuration {' or '.join(ours)} at {at!r}: expected one of {'; '.join(found)}"
        )
    for name in (name for name in ours if name in found):
        types = found[name][1]
        sent = peers.sent_types(derived(suite).frames.trial_of[trials_of(suite, name, at)["id"].iloc[0]])
        words = types if sent in types else f"{types}; ours sends {sent}"
        for library in peers.FAMILIES.values():
            if (library, types) not in found.values():
                continue
            setting = fastest_setting(suite, library, types, at)
            pairs = name, setting, at
            gain, agree = speedup(suite, *pairs), pairs_agree(suite, *pairs)
            ratio, known = gain.interval.estimate, gain.interval.known
            faster, slower = (
                gain.verdict == verdict if known else agree and beyond
                for verdict, beyond in (("better", ratio > 1), ("worse", ratio < 1))
            )
            rows.append(
                Beside(name, words, library, setting, gain, pair_range(suite, *pairs), faster, slower)
            )
    return rows


def outcomes(rows: Sequence[Beside]) -> str:
    """Return as text in how many comparisons our configuration is faster than the library's, and in how many slower.

    For example, ``faster in 3 of 6 comparisons, slower in 2, and not significantly different in 1``.
    """
    faster, slower = sum(row.faster for row in rows), sum(row.slower for row in rows)
    rest = [row for row in rows if not (row.faster or row.slower)]
    alike = sum(row.speedup.interval.known for row in rest)
    share = "all" if faster == len(rows) else f"{faster} of"
    parts = [f"faster in {share} {len(rows)} comparisons"]
    parts += [f"slower in {slower}"] * bool(slower)
    parts += [f"not significantly different in {alike}"] * bool(alike)
    # With fewer than six pairs there is no interval, so that a difference cannot be significant.
    parts += [f"of unknown order in {len(rest) - alike}, whose pairs disagree"] * (len(rest) > alike)
    return listed(parts)


def not_beside(suite: str, at: str = "") -> str:
    """Return as text which libraries, or our configurations, have no records in fp32 or in bf16; empty if all have.

    For example, ``FSDP2 in bf16, ours in bf16``.
    """
    found = {*_types(suite, at).values()}
    wanted = [(library, types) for types in ("fp32", "bf16") for library in (*peers.FAMILIES.values(), "")]
    return ", ".join(f"{key[0] or 'ours'} in {key[1]}" for key in wanted if key not in found)


def settings_tried(suite: str, at: str = "") -> int:
    """Return the number of libraries' settings of which a suite has records."""
    return sum(bool(library) for library, _ in _types(suite, at).values())


def not_repeated(search: str, suite: str, at: str = "") -> str:
    """Name the fastest settings in the suite ``search`` of which the other suite has no records; empty if none.

    These are the fastest setting of each library in fp32, and in bf16.  Settings that compute in one type and send the
    other are left out.
    """
    found, repeated = {*_types(search, "").values()}, _types(suite, at)
    classes = [(library, types) for library in peers.FAMILIES.values() for types in ("fp32", "bf16")]
    fastest = [fastest_setting(search, *each) for each in classes if each in found]
    return ", ".join(name for name in fastest if name not in repeated)
