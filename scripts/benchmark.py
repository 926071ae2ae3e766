"""How fast a training step is, against the same model with Flax's own attention. Paired in one run; quote the ratios.

    python scripts/benchmark.py [--shape small|large|all] [--rounds 7]

Both sides: the same configuration and initial scale, `jax.jit` on plain dicts, the same AdamW with clipping, the same
data. Only the attention module and the layout of the tokens differ: ours is `mha_jax` as it trains (several steps a
call, one device per core); theirs is `nnx.MultiHeadAttention` on [B, T, D], one step a call on one device that holds
all cores, which is what JAX does by default. The two take turns, and each round gives one ratio.
"""
import argparse
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from mha_jax.config import Config, DataConfig, ModelConfig
from mha_jax.data.source import make_source
from mha_jax.layout import residual_sharding
from mha_jax.model import transformer
from mha_jax.probes.icl import token_loss
from mha_jax.training import optimizer, sharding, state, step
from mha_jax.validation import resolve

SHAPES = {
    "small": Config(name="2 layers, d 64, 4 heads, vocabulary 64, 64 x 64", steps_per_call=10),
    "large": Config(
        name="4 layers, d 256, 8 heads, vocabulary 512, 16 x 256", steps_per_call=2,
        model=ModelConfig(num_layers=4, d_model=256, num_heads=8, num_kv_heads=8, mlp="gelu", positions="learned"),
        data=DataConfig(vocab_size=512, length=256, batch_size=16),
    ),
}  # fmt: skip


class FlaxBlock(nnx.Module):
    """A pre-norm block with Flax's attention."""

    def __init__(self, m: ModelConfig, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(m.d_model, use_bias=False, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(m.num_heads, m.d_model, use_bias=False, decode=False, rngs=rngs)
        self.mlp = m.mlp != "none"
        if self.mlp:
            self.mlp_norm = nnx.LayerNorm(m.d_model, use_bias=False, rngs=rngs)
            self.up = nnx.Linear(m.d_model, m.d_mlp, use_bias=False, rngs=rngs)
            self.down = nnx.Linear(m.d_mlp, m.d_model, use_bias=False, rngs=rngs)

    def __call__(self, x_BTD, mask):
        x_BTD = x_BTD + self.attention(self.norm(x_BTD), mask=mask)
        if self.mlp:
            x_BTD = x_BTD + self.down(nnx.gelu(self.up(self.mlp_norm(x_BTD))))
        return x_BTD


class FlaxModel(nnx.Module):
    """The same transformer, written the way Flax's guides do."""

    def __init__(self, m: ModelConfig, rngs: nnx.Rngs):
        self.embed = nnx.Embed(m.vocab_size, m.d_model, rngs=rngs)
        self.positions = nnx.Embed(m.max_length, m.d_model, rngs=rngs)
        self.blocks = nnx.List([FlaxBlock(m, rngs) for _ in range(m.num_layers)])
        self.norm = nnx.LayerNorm(m.d_model, use_bias=False, rngs=rngs)
        self.unembed = nnx.Linear(m.d_model, m.vocab_size, use_bias=False, rngs=rngs)

    def __call__(self, tokens_BT):
        x_BTD = self.embed(tokens_BT) + self.positions(jnp.arange(tokens_BT.shape[1]))
        mask = nnx.make_causal_mask(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, mask)
        return self.unembed(self.norm(x_BTD))


def flax_steps(config: Config, tokens):
    """A function that makes `steps_per_call` updates of the Flax model and waits for them."""
    m = config.model
    model = FlaxModel(m, nnx.Rngs(0))
    graph, params = nnx.graphdef(model), nnx.to_pure_dict(nnx.state(model, nnx.Param))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optimizer.learning_rate(config.optimizer, 1000),
                                                                 config.optimizer.b1, config.optimizer.b2))  # fmt: skip

    def loss(params, x):
        return token_loss(nnx.merge(graph, params)(x[:, :-1]), x[:, 1:]).mean()

    @jax.jit
    def update(params, moments, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, moments = tx.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, value

    now = [params, tx.init(params)]

    def run():
        for x in tokens:
            *now[:], value = update(*now, x)
        jax.block_until_ready(value)

    return run


def our_steps(config: Config, mesh):
    """A function that makes `steps_per_call` updates of ours and waits for them, batches already on the devices."""
    source = make_source(config, mesh)
    batches = source.batches(0, config.steps_per_call)
    run_steps = step.compile_train_steps(config, transformer.graphdef(config.model), state.abstract_state(config, mesh),
                                         batches, mesh, residual_sharding(mesh))  # fmt: skip
    now = [state.sharded_init(config, mesh)]

    def run():
        now[0], metrics = run_steps(now[0], batches, jnp.int32(config.steps_per_call))
        jax.block_until_ready(metrics)

    return run, batches


def seconds(run, repeats: int) -> float:
    """Seconds of `repeats` calls."""
    begin = time.perf_counter()
    for _ in range(repeats):
        run()
    return time.perf_counter() - begin


def measure(name: str, rounds: int):
    """Prints tokens/s of both sides and the ratio, round by round, then the medians."""
    config = resolve(SHAPES[name])
    mesh = sharding.make_mesh(config)
    ours, batches = our_steps(config, mesh)
    rows = np.concatenate([batches["inputs_BT"], np.asarray(batches["targets_BT"])[..., -1:]], axis=-1)
    with jax.default_device(jax.devices()[0]):
        theirs = flax_steps(config, [jnp.asarray(x) for x in rows])
    for run in (ours, theirs):
        run()
    tokens = config.data.batch_size * config.data.length * config.steps_per_call
    repeats = max(1, round(2.0 / seconds(ours, 1)))
    ratios, rates = [], []
    for _ in range(rounds):
        a, b = seconds(ours, repeats), seconds(theirs, repeats)
        ratios.append(b / a)
        rates.append((tokens * repeats / a, tokens * repeats / b))
        print(f"  {rates[-1][0]:>9,.0f} and {rates[-1][1]:>9,.0f} tokens/s, ratio {ratios[-1]:.2f}", flush=True)
    ours_rate, flax_rate = (statistics.median(r[i] for r in rates) for i in (0, 1))
    print(f"{name} ({config.name}): {ours_rate:,.0f} against {flax_rate:,.0f} tokens/s; ratio "
          f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=(*SHAPES, "all"), default="all")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    sharding.use_cpu_devices(resolve(Config()))
    for name in SHAPES if args.shape == "all" else (args.shape,):
        measure(name, args.rounds)


if __name__ == "__main__":
    main()
