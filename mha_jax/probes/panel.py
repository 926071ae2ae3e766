"""The panel: everything that is measured of a model at one step, in one jitted call, on frozen tokens.

`Panel.measure(params)` is the full panel, `Panel.light(params)` prefix matching alone. Both compute in
float32 at the highest matrix precision whatever the training precision, so that numbers compare between machines.
"""
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from mha_jax.config import SMALL_VOCAB, Config, ConfigError, kept_heads
from mha_jax.data.source import Evaluation, to_batch
from mha_jax.layout import put_rows, replicated, residual_sharding
from mha_jax.model import transformer
from mha_jax.probes import behaviour, icl, induction

SAMPLE = 25  # distinct tokens of a copying sample (Olsson et al. 2022)
FREQUENT = float(np.log(10))  # nats: a pair is frequent in training when its second token follows in a tenth or more
SEED = 20_220_308  # of the probe tokens, the same for every run


@dataclasses.dataclass(frozen=True)
class Reading:
    """One panel: `values` are numbers for the log, by metric name; `arrays` go to the .npz, shapes in the names."""

    values: dict[str, float]
    arrays: dict[str, np.ndarray]


def repeats(config: Config, source, evaluation: Evaluation) -> dict[str, tuple[tuple[int, ...], np.ndarray]]:
    """Probe name -> (periods, tokens [P, rows, T]); the first one is what `induction` and formation mean.

    Synthetic tasks: blocks of distinct random tokens. Text: spans of the corpus itself, from which random tokens
    are far, and random blocks beside them as `induction_random`. A small vocabulary: the task's own sequences.
    """
    length, rows = config.data.length, config.probes.repeats
    exclude = () if source.tokenizer is None else (source.tokenizer.eot,)
    drawn = config.data.vocab_size - len(exclude)
    if drawn < SMALL_VOCAB:
        return {"induction": ((0,), evaluation.tokens_RU[None, :rows, :-1])}
    periods = config.probes.periods or induction.default_periods(length, drawn)
    blocks_PRT = np.stack([
        induction.repeated_blocks(SEED + p, config.data.vocab_size, p, length, rows, exclude) for p in periods
    ])  # fmt: skip
    if source.tokenizer is None:
        return {"induction": (periods, blocks_PRT)}
    spans_PRT = np.stack([induction.repeat_to(source.spans(rows, p, SEED + p), length) for p in periods])
    return {"induction": (periods, spans_PRT), "induction_random": (periods, blocks_PRT)}


class Panel:
    """The frozen probe tokens of a run, on a mesh, and the compiled measurement."""

    def __init__(self, config: Config, source, mesh):
        self.config, self.mesh, self.source = config, mesh, source
        if config.model.kept_heads is not None and not any(config.model.kept_heads):
            raise ConfigError("config.model.kept_heads leaves no head in any layer: there is nothing to probe")
        self.model = dataclasses.replace(config.model, dtype="float32", attention="auto")
        self.graph = transformer.graphdef(self.model)
        self.evaluation = source.evaluation()
        copyable_RT = np.asarray(icl.copyable(self.evaluation.tokens_RU))
        self.parts = self.evaluation.parts | {"copyable": copyable_RT, "not_copyable": ~copyable_RT}
        if "bigram" in self.evaluation.lines:  # else what training made frequent passes for copied from the context
            frequent_RT = self.evaluation.lines["bigram"] < FREQUENT
            self.parts |= {"copyable_frequent": copyable_RT & frequent_RT, "copyable_rare": copyable_RT & ~frequent_RT}
        self.repeats = repeats(config, source, self.evaluation)
        batch = to_batch(self.evaluation.tokens_RU)
        self._inputs = {
            "rows_BT": put_rows(mesh, batch["inputs_BT"][: config.probes.rows]),
            "rest_BT": put_rows(mesh, batch["inputs_BT"][config.probes.rows :]),
            "targets_BT": put_rows(mesh, batch["targets_BT"]),
            "early_BT": put_rows(mesh, self.evaluation.early_RT),
            "late_BT": put_rows(mesh, self.evaluation.late_RT),
            "sample_BS": put_rows(mesh, self._sample()),
        }
        self._repeats = {name: put_rows(mesh, tokens, leading=1) for name, (_, tokens) in self.repeats.items()}
        self.copying_chance, self.copying_sd = behaviour.copying_chance(self._sample())
        self.chance_P = {name: np.array([float(induction.chance(induction.prefix_targets(t), config.model.window))
                                         for t in tokens]) for name, (_, tokens) in self.repeats.items()}  # fmt: skip
        self.ceiling = min(float(induction.ceiling(induction.prefix_targets(t), config.model.window))
                           for t in self.repeats["induction"][1])  # fmt: skip
        self.chances = self._chances()
        self.limits = self._limits()
        self._measure = self._jit(self._measure_arrays)
        self._light = self._jit(lambda params, inputs, repeats: self._prefix_scores(params, repeats))

    def _jit(self, function):
        return jax.jit(function, out_shardings=replicated(self.mesh))

    def compile(self, params):
        """Compiles both measurements for parameters like these, so that no probe pays for it."""
        with jax.default_matmul_precision("highest"):
            self._measure = self._measure.lower(params, self._inputs, self._repeats).compile()
            self._light = self._light.lower(params, self._inputs, self._repeats).compile()

    def measure(self, params) -> Reading:
        """The full panel."""
        with jax.default_matmul_precision("highest"):
            found = jax.tree.map(np.asarray, self._measure(params, self._inputs, self._repeats))
        return self._reading(found)

    def light(self, params) -> Reading:
        """Prefix matching of every head alone: cheap enough to follow a formation closely. arrays: induction_PLN."""
        with jax.default_matmul_precision("highest"):
            found = jax.tree.map(np.asarray, self._light(params, self._inputs, self._repeats))
        return Reading(self._induction_values(found), {"induction_PLN": found["induction"]})

    def _sample(self):
        exclude = () if self.source.tokenizer is None else (self.source.tokenizer.eot,)
        allowed = np.setdiff1d(np.arange(self.config.data.vocab_size), exclude)
        rng = np.random.default_rng(SEED)
        shuffled_BV = rng.permuted(np.tile(allowed, (self.config.probes.repeats, 1)), axis=1)
        return shuffled_BV[:, :min(SAMPLE, self.config.data.length)].astype(np.int32)

    def _forward(self, params, tokens_BT, **kwargs):
        sharding = residual_sharding(self.mesh)
        return transformer.forward(self.graph, params, tokens_BT, residual_sharding=sharding, **kwargs)

    def _prefix_scores(self, params, repeats):
        """{probe: score_PLN}; one repeat length at a time, for a pattern of every head is large."""

        def of_period(tokens_BT):
            pattern_LBNTS = self._forward(params, tokens_BT, capture=("pattern",))[1].pattern_LBNTS
            return induction.target_mass(pattern_LBNTS, induction.prefix_targets(tokens_BT))

        return {name: jax.lax.map(of_period, tokens_PBT) for name, tokens_PBT in repeats.items()}

    def _measure_arrays(self, params, x, repeats):
        m, group = self.model, self.model.num_heads // self.model.num_kv_heads
        logits_BTV, aux, _ = self._forward(params, x["rows_BT"], capture=("pattern",))
        if len(x["rest_BT"]):
            logits_BTV = jnp.concatenate([logits_BTV, self._forward(params, x["rest_BT"])[0]])
        loss_BT = icl.token_loss(logits_BTV, x["targets_BT"])
        score, error = icl.icl_score(loss_BT, x["early_BT"], x["late_BT"])
        pattern_LBNTS = aux.pattern_LBNTS
        allowed_T = induction.allowed_counts(self.config.data.length, m.window)
        scores = {
            "previous_token": behaviour.previous_token(pattern_LBNTS),
            "duplicate_token": behaviour.duplicate_token(pattern_LBNTS, x["rows_BT"]),
            "first_token": behaviour.first_token(pattern_LBNTS),
            "self": behaviour.self_attention(pattern_LBNTS),
            "confidence": behaviour.confidence(pattern_LBNTS),
            "entropy": behaviour.entropy(pattern_LBNTS, allowed_T, m.sink),
            "copying": self._copying(params, x["sample_BS"]),
        }
        apart = {"cosine": behaviour.disagreement_cosine(pattern_LBNTS, group),
                 "js": behaviour.disagreement_js(pattern_LBNTS, group, m.sink)}  # fmt: skip
        return {
            "loss_BT": loss_BT, "icl_score": score, "icl_score_se": error, "icl_olsson": icl.olsson(loss_BT),
            "prefix": self._prefix_scores(params, repeats), "scores": scores,
            "disagreement": {k: v._asdict() for k, v in apart.items()},
        }  # fmt: skip

    def _copying(self, params, sample_BS):
        m, group = self.model, self.model.num_heads // self.model.num_kv_heads
        v_LBSKH = self._forward(params, sample_BS, capture=("v",))[1].v_LBSKH
        wo_LNHD = jnp.stack([_out_kernel(m, params, layer) for layer in range(m.num_layers)])
        result_LBNSD = jnp.einsum("LBSNH,LNHD->LBNSD", jnp.repeat(v_LBSKH, group, axis=3), wo_LNHD)
        unembed_DV = params["embed_VD"].T if m.tied else params["unembed_DV"]
        gain_D = None if m.norm == "none" else params["final_norm"]["scale_D"]
        unembed_DV = behaviour.fold_final_norm(gain_D, unembed_DV, centred=m.norm == "layer")
        return behaviour.copying(result_LBNSD, unembed_DV, sample_BS)

    def _chances(self) -> dict[str, float]:
        rows_RT = self.evaluation.tokens_RU[: self.config.probes.rows, :-1]
        found = behaviour.uniform_values(rows_RT, self.config.model.window)
        return {k: float(v) for k, v in found.items()} | {"entropy": 1.0, "copying": self.copying_chance}

    def _limits(self) -> dict[str, float]:
        """The lines every curve is read against, all on the evaluation rows."""
        e = self.evaluation
        out = {f"limit/{name}": float(line.mean()) for name, line in e.lines.items()}
        for name in ("unigram", "bayes"):
            if name in e.lines:
                out[f"icl/{name}"] = float(icl.icl_score(e.lines[name], e.early_RT, e.late_RT)[0])
        return out

    def _induction_values(self, prefix) -> dict[str, float]:
        out = {}
        for name, scores_PLN in prefix.items():
            pm = induction.prefix_matching(scores_PLN, self.chance_P[name])
            best = induction.best_head(pm.strength_LN)
            out |= {f"{name}/{k}": v for k, v in heads(pm.score_LN).items()}
            ordered = np.sort(pm.score_LN[~np.isnan(pm.score_LN)])[::-1]
            out |= {f"{name}/sorted_{i}": float(v) for i, v in enumerate(ordered)}
            if best[0] >= 0:
                out |= {f"{name}/max": float(ordered[0]), f"{name}/strength": float(pm.strength_LN[best]),
                        f"{name}/chance": float(pm.chance_LN[best])}  # fmt: skip
        return out

    def _reading(self, found) -> Reading:
        e, loss_BT = self.evaluation, found["loss_BT"]
        values = {"eval/loss": float(loss_BT.mean(dtype=np.float64))}
        values |= {f"eval/{name}": float(loss_BT[mask].mean(dtype=np.float64)) for name, mask in self.parts.items()
                   if mask.any()}  # fmt: skip
        values |= {"icl/score": float(found["icl_score"]), "icl/score_se": float(found["icl_score_se"])}
        if found["icl_olsson"] is not None:
            values["icl/olsson"] = float(found["icl_olsson"])
        values |= {k: v for k, v in self.limits.items() if k.startswith("icl/")}
        values |= self._induction_values(found["prefix"])
        arrays = {"loss_by_position_T": loss_BT.mean(0, dtype=np.float64)}
        arrays |= {f"{name}_by_position_T": line.mean(0) for name, line in e.lines.items()}
        for name, (periods, _) in self.repeats.items():
            arrays |= {f"{name}_PLN": found["prefix"][name], f"{name}_periods_P": np.array(periods),
                       f"{name}_chance_P": self.chance_P[name]}  # fmt: skip
        for name in behaviour.HEAD_SCORES:
            arrays |= {f"{name}_LN": found["scores"][name], f"{name}_chance": np.float64(self.chances[name])}
            values |= {f"{name}/{k}": v for k, v in heads(found["scores"][name]).items()}
        for name, parts in found["disagreement"].items():
            arrays |= {f"disagreement_{name}_{part}": value_L for part, value_L in parts.items()}
            values |= {f"disagreement_{name}/L{i}": float(v) for i, v in enumerate(parts["all_L"]) if np.isfinite(v)}
        return Reading(values, arrays)

    def prefix_matching(self, arrays: dict) -> induction.PrefixMatching:
        """Scores and strengths of every head over all repeat lengths, from a reading's arrays."""
        return induction.prefix_matching(arrays["induction_PLN"], self.chance_P["induction"])

    def induction_heads(self, arrays: dict) -> list[tuple[int, int]]:
        """Heads that match the prefix at strength 0.5 or more and copy three sd above chance."""
        pm = self.prefix_matching(arrays)
        is_LN = induction.is_induction_head(pm.strength_LN, arrays["copying_LN"], self.copying_chance, self.copying_sd)
        return [(int(layer), int(head)) for layer, head in np.argwhere(is_LN)]


def head_name(layer: int, head: int) -> str:
    """'L1H3': layer 1, query head 3 of the original model, both from 0."""
    return f"L{layer}H{head}"


def heads(score_LN) -> dict[str, float]:
    """{'L0H0': score, ...} of the heads that exist."""
    return {head_name(i, j): float(score_LN[i, j]) for i, j in np.argwhere(~np.isnan(score_LN))}


def _out_kernel(model, params, layer):
    """wo_NHD of a layer on the original heads, NaN where a head is gone."""
    kept = kept_heads(model)[layer]
    empty_NHD = jnp.full((model.num_heads, model.head_dim, model.d_model), jnp.nan)
    if not len(kept):
        return empty_NHD
    return empty_NHD.at[jnp.array(kept)].set(params["layers"][transformer.layer_key(layer)]["attention"]["wo_NHD"])


