"""Heads that learn to close: a hard-concrete gate on each, and a price for every one that stays open.

Voita et al. 2019 (section 5), after Louizos et al. 2018; constants as in Voita's code. While training, a head's gate
is drawn once a batch: s = sigmoid((ln u - ln(1 - u) + log alpha) / beta), u uniform, stretched to (gamma, zeta) and
clipped to [0, 1], so that exactly 0 and exactly 1 are drawn. The loss is the mean loss over real tokens plus
penalty x sum over gates of P(gate > 0). Start from a trained model; vary the penalty for a front.

L layers, J gates of a layer: the N query heads, or the K groups whose heads read one KV head.
"""
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mha_jax.config import ConfigError
from mha_jax.layout import replicated, residual_sharding
from mha_jax.model.interventions import Interventions
from mha_jax.probes.panel import head_name
from mha_jax.probes.subject import Subject
from mha_jax.pruning.ablation import present
from mha_jax.pruning.importance import any_of_gate, heads_per_gate
from mha_jax.training.loop import NonFinite
from mha_jax.training.step import loss_sum

BETA = 0.33  # temperature
LOW, HIGH = -0.1, 1.1  # gamma, zeta
EPS = 1e-6  # u stays this far inside (0, 1)
# Where log alpha starts. Voita's start near 0, half closed; a trained model should start nearly whole: P(open) = 0.94.
INITIAL = 2.0


class GatesResult(NamedTuple):
    """log_alpha_LN, open_LN = P(gate > 0), gate_LN the gate without noise: float64 [L, J], NaN where no head is.

    survivors: the (layer, query head) whose gate is above 0.5. params: those given, or as trained along with the
    gates. losses_S: mean loss in nats of every step, under that step's draw and without the penalty.
    """

    log_alpha_LN: np.ndarray
    open_LN: np.ndarray
    gate_LN: np.ndarray
    survivors: list[tuple[int, int]]
    params: dict
    losses_S: np.ndarray


class Point(NamedTuple):
    """One penalty of a front, and what came of it."""

    penalty: float
    result: GatesResult

    @property
    def kept(self) -> int:
        """How many query heads survive."""
        return len(self.result.survivors)

    @property
    def names(self) -> list[str]:
        """Which ones."""
        return [head_name(*head) for head in self.result.survivors]


def sample(log_alpha, u):
    """The gate drawn with uniform noise u in (0, 1)."""
    s = jax.nn.sigmoid((jnp.log(u) - jnp.log1p(-u) + log_alpha) / BETA)
    return jnp.clip(s * (HIGH - LOW) + LOW, 0.0, 1.0)


def evaluate(log_alpha):
    """The gate without noise; above 0.5 exactly where log_alpha > 0."""
    return jnp.clip(jax.nn.sigmoid(log_alpha) * (HIGH - LOW) + LOW, 0.0, 1.0)


def open_probability(log_alpha):
    """P(the drawn gate is above 0), in closed form."""
    return jax.nn.sigmoid(log_alpha - BETA * math.log(-LOW / HIGH))


def _optimizer(learning_rate, of_params) -> optax.GradientTransformation:
    """Adam on the gates and, where parameters are trained along, theirs on them."""
    each = {"log_alpha": optax.adam(learning_rate)} | ({} if of_params is None else {"params": of_params})
    return optax.partition(each, {name: name for name in each})


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _step(graph, size, of_params, sharding, learned, moments, fixed, batch, exists_LJ, knobs, seed, step):
    """One update: (learned, moments, [mean loss, gradient norm]). Penalty and learning rate, the `knobs`, are traced:
    one executable for a whole front."""
    u_LJ = jax.random.uniform(jax.random.fold_in(jax.random.key(seed), step), exists_LJ.shape, minval=EPS,
                              maxval=1 - EPS)  # fmt: skip

    def objective(learned):
        gate_LN = jnp.repeat(sample(learned["log_alpha"], u_LJ), size, axis=-1)
        params = learned.get("params", fixed)
        loss = loss_sum(graph, params, batch, Interventions(gate_LN=gate_LN), sharding)
        loss = loss / jnp.maximum(batch["weights_BT"].sum(), 1.0)
        return loss + knobs["penalty"] * (open_probability(learned["log_alpha"]) * exists_LJ).sum(), loss

    (_, loss), grads = jax.value_and_grad(objective, has_aux=True)(learned)
    updates, moments = _optimizer(knobs["learning_rate"], of_params).update(grads, moments, learned)
    return optax.apply_updates(learned, updates), moments, jnp.stack([loss, optax.tree.norm(grads)])


def train_gates(subject: Subject, batches: Callable[[int], dict], *, penalty: float, steps: int, learning_rate: float,
                seed: int, unit: str = "head", of_params: optax.GradientTransformation | None = None,
                progress: Callable[[int], None] = lambda steps: None) -> GatesResult:  # fmt: skip
    """Trains the gates for `steps` steps, the model frozen, or along with it by the optimizer `of_params`.

    batches: step -> batch as `data.source` makes it. unit: see `importance.UNITS`. progress is told after each step
    how many were made. The result is a pure function of (seed, steps) and what is given. Give the same `of_params`
    object each time: another one compiles again.
    ConfigError for a penalty below 0, a learning rate not above 0, no steps or an unknown unit; NonFinite as soon as
    a loss or gradient is not.
    """
    size = heads_per_gate(subject.cfg, unit)
    # Negated, so that NaN is refused too.
    if not 0 <= penalty < math.inf:
        raise ConfigError(f"penalty = {penalty}: allowed is a finite number, 0 or more")
    if not 0 < learning_rate < math.inf:
        raise ConfigError(f"learning_rate = {learning_rate}: allowed is a finite number above 0")
    if steps < 1:
        raise ConfigError(f"steps = {steps}: allowed is 1 or more")
    exists_LJ = any_of_gate(present(subject), size)
    learned = {"log_alpha": jnp.full(exists_LJ.shape, INITIAL, jnp.float32)}
    if of_params is not None:
        learned["params"] = subject.params
    # All on the mesh from the start: what comes out of a step is, and would else compile a second one.
    learned = _placed(learned, subject.mesh)
    moments = _placed(_optimizer(learning_rate, of_params).init(learned), subject.mesh)
    fixed = subject.params if of_params is None else None
    sharding = residual_sharding(subject.mesh)
    knobs = {"penalty": float(penalty), "learning_rate": float(learning_rate)}
    losses = []
    with jax.default_matmul_precision("highest"):
        for step in range(steps):
            learned, moments, found = _step(subject.graph, size, of_params, sharding, learned, moments, fixed,
                                            batches(step), exists_LJ, knobs, seed, step)  # fmt: skip
            loss, norm = np.asarray(found)
            if not np.isfinite([loss, norm]).all():
                raise NonFinite(f"gates at penalty {penalty}, step {step}: loss {loss}, gradient norm {norm}", step)
            losses.append(loss)
            progress(1)
    log_alpha_LJ = np.where(exists_LJ, np.asarray(learned["log_alpha"], np.float64), np.nan)
    kept_LN = np.repeat(log_alpha_LJ > 0, size, axis=1) & present(subject)
    return GatesResult(
        log_alpha_LJ, *(np.asarray(f(log_alpha_LJ), np.float64) for f in (open_probability, evaluate)),
        [(int(layer), int(head)) for layer, head in np.argwhere(kept_LN)], learned.get("params", subject.params),
        np.array(losses, np.float64),
    )  # fmt: skip


def front(subject: Subject, batches: Callable[[int], dict], penalties, **kwargs) -> list[Point]:
    """`train_gates` at every penalty, each from the same start and on the same batches; one compilation.

    kwargs: those of `train_gates` but the penalty. What a point's heads lose is the caller's to measure, by cutting
    off every head but `result.survivors`.
    """
    return [Point(float(penalty), train_gates(subject, batches, penalty=penalty, **kwargs)) for penalty in penalties]


def _placed(tree, mesh):
    """Arrays that lie nowhere in particular, onto every device of the mesh."""
    return jax.tree.map(lambda x: x if getattr(x, "committed", False) else jax.device_put(x, replicated(mesh)), tree)
