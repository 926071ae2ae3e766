"""One optimizer step and several of them in one device call; pure functions of arrays."""
import functools

import jax
import jax.numpy as jnp
import optax
from flax import serialization

from mha_jax.config import Config
from mha_jax.model import transformer
from mha_jax.probes import icl
from mha_jax.training import clamp as clamps
from mha_jax.training import optimizer as optimizers

METRICS = ("train/loss", "train/grad_norm", "train/learning_rate", "train/tokens")


def loss_sum(graph, params, batch, interventions=None, residual_sharding=None):
    """Sum over real tokens of the loss, in nats. A sum, so that micro-batches of unequal weight add up exactly."""
    logits_BTV, _, _ = transformer.forward(
        graph, params, batch["inputs_BT"], positions_BT=batch["positions_BT"], segments_BT=batch["segments_BT"],
        interventions=interventions, residual_sharding=residual_sharding,
    )  # fmt: skip
    return (icl.token_loss(logits_BTV, batch["targets_BT"]) * batch["weights_BT"]).sum()


def mean_loss_and_grads(graph, params, batch, accumulation, clamp=None, residual_sharding=None):
    """(mean loss over all real tokens of the batch, its gradient, number of tokens).

    clamp: function of (tokens, positions, segments) giving the interventions for those rows, or None.
    Each micro-batch's sum is divided by the tokens of the *whole* batch: the mean of micro-batch means would
    weigh short rows too much. No real token: loss 0, gradients 0.
    """
    tokens = batch["weights_BT"].sum()

    def mean_loss(params, part):
        held = clamp and clamp(part["inputs_BT"], part["positions_BT"], part["segments_BT"])
        return loss_sum(graph, params, part, held, residual_sharding) / jnp.maximum(tokens, 1.0)

    grad = jax.value_and_grad(mean_loss)
    if accumulation == 1:
        return *grad(params, batch), tokens
    # Rows of a micro-batch are strided over the batch, so each device's rows stay on it.
    parts = jax.tree.map(
        lambda x: x.reshape(x.shape[0] // accumulation, accumulation, *x.shape[1:]).swapaxes(0, 1), batch
    )
    zero = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
    total, _ = jax.lax.scan(lambda acc, part: (jax.tree.map(jnp.add, acc, grad(params, part)), None), zero, parts)
    return *total, tokens


def train_step(config: Config, graph, state, batch, clamp=None, residual_sharding=None):
    """One update: (state, metrics as a vector in the order of METRICS).

    clamp: what `clamp.make` gives, a function of the step and a batch's rows, or None.
    From the first loss or gradient that is not finite, nothing changes any more and `failed_at` names the step.
    """
    rate = optimizers.learning_rate(config.optimizer, config.steps)
    optimizer = optimizers.make(config.optimizer, config.steps)
    loss, grads, tokens = mean_loss_and_grads(
        graph, state["params"], batch, config.optimizer.accumulation,
        None if clamp is None else functools.partial(clamp, state["step"]), residual_sharding,
    )  # fmt: skip
    norm = optax.tree.norm(grads)
    moments = serialization.from_state_dict(jax.eval_shape(optimizer.init, state["params"]), state["optimizer"])
    updates, moments = optimizer.update(grads, moments, state["params"])
    new = {
        "params": optax.apply_updates(state["params"], updates),
        "optimizer": serialization.to_state_dict(moments),
        "step": state["step"] + 1,
        "failed_at": state["failed_at"],
    }
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    going = finite & (state["failed_at"] < 0)
    state_out = jax.tree.map(lambda a, b: jnp.where(going, a, b), new, state)
    fails_now = ~finite & (state["failed_at"] < 0)
    state_out["failed_at"] = jnp.where(fails_now, state["step"], state["failed_at"])
    return state_out, jnp.stack([loss, norm, rate(state["step"]), tokens])


def train_steps(config: Config, graph, state, batches, count, clamp=None, residual_sharding=None):
    """`count` updates, traced, over batches stacked on a leading axis: one executable for every schedule.

    Returns (state, metrics [n, len(METRICS)], rows past `count` zero). Bit-equal to single steps.
    """
    size = batches["inputs_BT"].shape[0]

    def body(i, carry):
        state, metrics = carry
        batch = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), batches)
        state, of_step = train_step(config, graph, state, batch, clamp, residual_sharding)
        return state, metrics.at[i].set(of_step)

    return jax.lax.fori_loop(0, count, body, (state, jnp.zeros((size, len(METRICS)))))


def compile_train_steps(config: Config, graph, abstract_state, abstract_batches, mesh, residual_sharding):
    """`train_steps` compiled ahead of time for a mesh, the state donated. Call it with (state, batches, count)."""
    run = functools.partial(train_steps, config, graph, clamp=clamps.make(config.interventions, config.model),
                            residual_sharding=residual_sharding)  # fmt: skip
    with jax.default_matmul_precision(config.model.matmul_precision):
        out = (jax.tree.map(lambda x: x.sharding, abstract_state), None)
        jitted = jax.jit(run, donate_argnums=0, out_shardings=out)
        return jitted.lower(abstract_state, abstract_batches, jax.ShapeDtypeStruct((), jnp.int32)).compile()
