"""What a head is, in plain words, and the rule that says so. Host.

A score counts by its strength, (score - chance) / (1 - chance), chance being what a uniform head has on the same
tokens: in short sequences and narrow windows a uniform head alone would pass published limits. A head has one reading,
the first of `ORDER` whose rule it meets: what it does comes before how little it matters, and that before where it
rests.
A causal model has no next-token heads.
"""
from typing import NamedTuple

import numpy as np

from mha_jax.config import ConfigError
from mha_jax.probes import induction
from mha_jax.probes.panel import head_name

ORDER = ("induction", "previous-token", "duplicate", "idle", "sink", "broad", "none")
# Reading -> (score, least strength, where the limit comes from).
LIMITS = {
    "induction": ("induction", induction.FORMED, "with copying, Olsson et al. 2022; the limit is ours"),
    "previous-token": ("previous_token", 0.5, "Clark et al. 2019: above 0.5 on average"),
    "duplicate": ("duplicate_token", 0.5, "no published limit: that of induction"),
    "sink": ("first_token", 0.3, "Gu et al. 2025: above 0.3"),
}
IDLE = 0.01  # nats
BROAD = 0.78  # of the largest entropy: 3.8 nats of ln 128, the broad heads of Clark et al. 2019
NEEDED = (*(score for score, _, _ in LIMITS.values()), "copying", "entropy")


class Row(NamedTuple):
    """One head of the table. rule: what gave the reading, in words with its numbers. value: the number it rests on, a
    strength, a share of the largest entropy, or nats for `idle`; of `none`, the strength of the nearest rule."""

    head: str
    reading: str
    rule: str
    value: float


def readings(scores, chance, copying_sd, effect_LN=None) -> list[Row]:
    """A row for each head that exists, in the order of heads.

    scores: arrays [L, N], those of the panel by name and `induction`, the strength of prefix matching. chance: the
    panel's, by the same names; copying_sd: sd of copying by chance. effect_LN: change of the mean loss in nats when
    that head alone is zeroed, or None: then no head is called idle and the rules say so. ConfigError if a score is
    missing.
    """
    missing = [name for name in NEEDED if name not in scores]
    if missing:
        raise ConfigError(f"scores has no {missing[0]!r}: allowed is a dict with all of {', '.join(NEEDED)}")
    rows = []
    for layer, head in np.argwhere(~np.isnan(scores["previous_token"])):
        own = {name: float(scores[name][layer, head]) for name in NEEDED}
        effect = None if effect_LN is None else float(effect_LN[layer, head])
        rows.append(Row(head_name(layer, head), *_read(own, chance, copying_sd, effect)))
    return rows


def _read(own, chance, copying_sd, effect):
    """(reading, rule, value) of the head with these scores."""
    strength = {reading: own[score] if score == "induction" else induction.strength(own[score], chance[score])
                for reading, (score, _, _) in LIMITS.items()}  # fmt: skip
    met = {reading: strength[reading] >= limit for reading, (_, limit, _) in LIMITS.items()}
    rules = {reading: (met[reading], f"{score} strength {strength[reading]:.2f}, at least {limit} ({source})",
                       strength[reading]) for reading, (score, limit, source) in LIMITS.items()}  # fmt: skip
    copies = bool(induction.is_induction_head(1.0, own["copying"], chance["copying"], copying_sd))
    copying = f"copying {own['copying']:.3f}, chance + 3 sd {chance['copying'] + 3 * copying_sd:.3f}"
    _, words, value = rules["induction"]
    rules["induction"] = (met["induction"] and copies, f"{words}; {copying}", value)
    rules["broad"] = (own["entropy"] >= BROAD, f"entropy {own['entropy']:.2f} of the largest, at least {BROAD} "
                      "(Clark et al. 2019: 3.8 nats of ln 128)", own["entropy"])  # fmt: skip
    untested = "; idle not tested: no effect of zeroing given" if effect is None else ""
    rules["idle"] = (False, "", np.nan) if effect is None else (
        abs(effect) < IDLE, f"zeroing it changes the loss by {effect:+.4f} nats, less than {IDLE}", effect
    )  # fmt: skip
    for reading in ORDER[:-1]:
        is_met, words, value = rules[reading]
        if is_met:
            return reading, words + (untested if reading in ("sink", "broad") else ""), value
    if met["induction"]:
        return "none", f"matches the prefix without copying: {rules['induction'][1]}{untested}", strength["induction"]
    nearest = max(LIMITS, key=lambda r: -np.inf if np.isnan(strength[r]) else strength[r] / LIMITS[r][1])
    words = f"no rule is met; nearest {nearest}, strength {strength[nearest]:.2f} of {LIMITS[nearest][1]}{untested}"
    return "none", words, strength[nearest]


def share_without_reading(rows: list[Row]) -> float:
    """Share of the heads that no rule describes; NaN without heads."""
    return sum(row.reading == "none" for row in rows) / len(rows) if rows else float("nan")


def drawn_heads(seed: int, n: int, exists_LN) -> list[tuple[int, int]]:
    """n different heads (layer, head), drawn at random among those that exist, to be shown beside the best ones.

    ConfigError when there are not n.
    """
    heads = np.argwhere(exists_LN)
    if not 1 <= n <= len(heads):
        raise ConfigError(f"drawn heads n = {n}: allowed is 1 to {len(heads)}, the heads that exist")
    drawn = np.sort(np.random.default_rng(seed).choice(len(heads), n, replace=False))
    return [(int(layer), int(head)) for layer, head in heads[drawn]]
