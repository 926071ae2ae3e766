"""Every check of a config, made before anything is compiled.

`resolve` checks the whole and fills in each None that stands for "derived", so that what a run writes to
config.json is complete; `check_devices` checks the mesh once the devices are known.
"""
import dataclasses
import difflib
import os
import sys
import types
import typing

from mha_jax import config as configs
from mha_jax import held_out
from mha_jax.config import SMALL_VOCAB, Config, ConfigError, DataConfig, ModelConfig
from mha_jax.schedule import Schedule

INT_LIMIT = 2**31  # steps, positions and sizes are int32 on the devices; seeds from here up are for evaluation rows
CHOICES = {
    "model.positions": ("rope", "learned", "shortformer", "none"),
    "model.mlp": ("none", "gelu", "swiglu"),
    "model.norm": ("layer", "rms", "none"),
    "model.init": ("fan_in", "gpt2"),
    "model.attention": ("auto", "einsum", "blockwise", "fused"),
    "model.dtype": ("float32", "bfloat16"),
    "model.matmul_precision": ("default", "high", "highest"),
    "data.task": ("repeat", "trigger", "markov", "text"),
    "data.block": ("distinct", "iid"),
    "data.packing": ("concatenated", "packed"),
    "optimizer.schedule": ("cosine", "constant"),
    "interventions.kind": ("zero", "previous_token", "induction"),
    "mesh.platform": ("auto", "cpu", "gpu", "tpu"),
    "tracking.wandb": ("auto", "online", "offline", "disabled"),
}
POSITIVE = (
    "steps_per_call", "model.num_layers", "model.d_model", "model.num_heads", "model.num_kv_heads", "model.head_dim",
    "model.vocab_size", "model.max_length", "model.rope_theta", "model.d_mlp", "model.norm_eps", "model.window",
    "data.length", "data.batch_size", "data.vocab_size", "data.eval_rows", "data.period_min", "data.period_max",
    "data.num_triggers", "data.dirichlet_alpha", "optimizer.learning_rate", "optimizer.clip_norm", "optimizer.eps",
    "optimizer.accumulation", "mesh.data", "mesh.fsdp", "mesh.tensor", "probes.induction_every", "probes.rows",
    "probes.repeats", "interventions.end", "checkpoint.keep_latest", "tracking.log_every", "tracking.timeout",
)  # fmt: skip
NOT_NEGATIVE = (
    "seed", "steps", "data.table_seed", "optimizer.end_learning_rate", "optimizer.warmup_steps",
    "optimizer.weight_decay", "interventions.start", "checkpoint.keep_best",
)  # fmt: skip


def resolve(config: Config) -> Config:
    """Checks a config and returns a copy with every derived None filled in. ConfigError on the first fault."""
    _check_types(config)
    values = configs.flat(config)
    for key, allowed in CHOICES.items():
        if values[key] not in allowed:
            near = difflib.get_close_matches(values[key], allowed, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"config.{key} = {values[key]!r}: allowed are {', '.join(allowed)}{hint}")
    for keys, limit, ok in ((POSITIVE, "above 0", lambda v: v > 0), (NOT_NEGATIVE, "0 or more", lambda v: v >= 0)):
        for key in keys:
            _require(values[key] is None or ok(values[key]), f"config.{key} = {values[key]}: allowed is {limit}")
    config = configs.from_dict(configs.to_dict(config))
    _resolve_data(config.data)
    _resolve_model(config.model, config.data)
    _resolve_run(config)
    return config


def check_devices(config: Config, num_devices: int) -> tuple[int, int, int]:
    """Sizes of the mesh axes (data, fsdp, tensor) on `num_devices`, checked against batch and heads."""
    mesh = config.mesh
    rest = mesh.fsdp * mesh.tensor
    data = mesh.data or max(1, num_devices // rest)
    _require(data * rest == num_devices, f"config.mesh.data = {data}, config.mesh.fsdp = {mesh.fsdp}, "
             f"config.mesh.tensor = {mesh.tensor}: their product {data * rest} is not the number of devices, "
             f"{num_devices}")  # fmt: skip
    micro = config.data.batch_size // config.optimizer.accumulation
    shards = data * mesh.fsdp
    _require(micro % shards == 0, f"config.data.batch_size = {config.data.batch_size} over "
             f"config.optimizer.accumulation = {config.optimizer.accumulation} is {micro} rows, which do not divide by "
             f"config.mesh.data x config.mesh.fsdp = {shards}")  # fmt: skip
    for key, rows in (("data.eval_rows", config.data.eval_rows), ("probes.rows", config.probes.rows),
                      ("probes.repeats", config.probes.repeats)):  # fmt: skip
        _require(rows % shards == 0, f"config.{key} = {rows} does not divide by config.mesh.data x "
                 f"config.mesh.fsdp = {shards}")  # fmt: skip
    for layer, heads in enumerate(configs.kept_heads(config.model)):
        _require(len(heads) % mesh.tensor == 0, f"config.model.num_heads = {len(heads)} (layer {layer}) does not "
                 f"divide by config.mesh.tensor = {mesh.tensor}")  # fmt: skip
    return data, mesh.fsdp, mesh.tensor


def _check_types(config, path: str = ""):
    """Types of every field, and no field that does not exist: a file may assign anything to a dataclass."""
    known = {f.name: f.type for f in dataclasses.fields(config)}
    for key in vars(config):
        if key not in known:
            raise configs.unknown_key(f"{path}{key}")
    for key, kind in known.items():
        value = getattr(config, key)
        if dataclasses.is_dataclass(kind):
            if not isinstance(value, kind):
                raise ConfigError(f"config.{path}{key} = {value!r}: allowed is a {kind.__name__}")
            _check_types(value, f"{path}{key}.")
        elif not _is_a(value, kind):
            name = kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
            raise ConfigError(f"config.{path}{key} = {value!r}: allowed is {name}")
        elif kind is float and not abs(value) <= sys.float_info.max:  # NaN is not either
            raise ConfigError(f"config.{path}{key} = {value!r}: allowed is a finite number")
        elif kind is not float and isinstance(value, int) and value >= INT_LIMIT:
            raise ConfigError(f"config.{path}{key} = {value}: allowed is below 2^31")


def _is_a(value, kind) -> bool:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return any(_is_a(value, k) for k in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_is_a(v, typing.get_args(kind)[0]) for v in value)
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def _require(ok: bool, message: str):
    if not ok:
        raise ConfigError(message)


def _resolve_data(d: DataConfig):
    _require(0 < d.trigger_rate < 1, f"config.data.trigger_rate = {d.trigger_rate}: allowed is between 0 and 1")
    _require(0 < d.trigger_prior < 1, f"config.data.trigger_prior = {d.trigger_prior}: allowed is between 0 and 1")
    _require(d.length >= 2, f"config.data.length = {d.length}: allowed is 2 or more")
    if d.task == "repeat":
        low, high = d.period_min, d.period_max
        _require(1 <= low <= high, f"config.data.period_min = {low} and config.data.period_max = {high}: "
                 "allowed is 1 <= period_min <= period_max")  # fmt: skip
        _require(d.block == "iid" or high <= d.vocab_size, f"config.data.period_max = {high} is more than "
                 f"config.data.vocab_size = {d.vocab_size}: a block of distinct tokens does not fit; "
                 "lower it or set config.data.block = 'iid'")  # fmt: skip
        _require(low > 1 and high < d.length, f"config.data.period_min = {low}, config.data.period_max = {high}, "
                 f"config.data.length = {d.length}: the ICL windows t < period_min and t > period_max must not be "
                 "empty: allowed is period_min >= 2 and period_max < length")  # fmt: skip
    if d.task == "trigger":
        _require(1 <= d.num_triggers <= d.vocab_size - 2, f"config.data.num_triggers = {d.num_triggers}: "
                 f"allowed is 1 to config.data.vocab_size - 2 = {d.vocab_size - 2}")  # fmt: skip
    _require(d.eval_rows >= 2, f"config.data.eval_rows = {d.eval_rows}: allowed is 2 or more, for a standard error")
    if d.task != "repeat":
        _require(d.length >= 7, f"config.data.length = {d.length}: allowed is 7 or more, else the early ICL window, "
                 "positions 0.05 T to 0.15 T, is empty")  # fmt: skip
    if d.task == "markov":
        _require(d.vocab_size >= 2, f"config.data.vocab_size = {d.vocab_size}: allowed is 2 or more states")
    if d.task == "text":
        if d.dataset.startswith("files:"):  # a run folder is opened from anywhere
            d.dataset = "files:" + os.path.abspath(os.path.expanduser(d.dataset.removeprefix("files:")))
        if d.tokenizer.endswith(".json"):
            d.tokenizer = os.path.abspath(os.path.expanduser(d.tokenizer))
        if d.tokenizer == "bytes":
            d.vocab_size = 257  # 256 byte values and the end of a document
        _require(d.tokenizer in ("bpe", "bytes") or d.tokenizer.endswith(".json"),
                 f"config.data.tokenizer = {d.tokenizer!r}: allowed are bpe, bytes, or the path of a tokenizer.json")
        _require(held_out.is_valid(d.validation), f"config.data.validation = {d.validation!r}: allowed are auto, a "
                 "share such as 5%, or a number of documents")  # fmt: skip
        _require(d.vocab_size >= 257 or d.tokenizer != "bpe", f"config.data.vocab_size = {d.vocab_size}: allowed is "
                 "257 or more, 256 bytes and the end of a document")  # fmt: skip


def _resolve_model(m: ModelConfig, d: DataConfig):
    if m.head_dim is None:
        _require(m.d_model % m.num_heads == 0, f"config.model.d_model = {m.d_model} does not divide by "
                 f"config.model.num_heads = {m.num_heads}: change one, or set config.model.head_dim")  # fmt: skip
        m.head_dim = m.d_model // m.num_heads
    _require(m.num_heads % m.num_kv_heads == 0, f"config.model.num_heads = {m.num_heads} does not divide by "
             f"config.model.num_kv_heads = {m.num_kv_heads}: allowed are "
             f"{', '.join(str(k) for k in range(1, m.num_heads + 1) if m.num_heads % k == 0)}")  # fmt: skip
    _require(m.positions != "rope" or m.head_dim % 2 == 0,
             f"config.model.head_dim = {m.head_dim}: allowed is an even number with positions = 'rope'")
    if m.vocab_size is None:
        m.vocab_size = d.vocab_size
    _require(m.vocab_size >= d.vocab_size, f"config.model.vocab_size = {m.vocab_size} is less than "
             f"config.data.vocab_size = {d.vocab_size}")  # fmt: skip
    if m.max_length is None:
        m.max_length = d.length
    _require(m.positions in ("rope", "none") or m.max_length >= d.length, f"config.data.length = {d.length} is more "
             f"than config.model.max_length = {m.max_length}, the rows of the position table")  # fmt: skip
    if m.d_mlp is None and m.mlp != "none":
        m.d_mlp = 4 * m.d_model if m.mlp == "gelu" else -(-8 * m.d_model // 3 // 8) * 8
    if m.attention == "fused":
        _require(not m.sink, "config.model.attention = 'fused' cannot add a sink logit (config.model.sink = True): "
                 "allowed are auto, einsum, blockwise")  # fmt: skip
    if m.kept_heads is not None:
        _require(len(m.kept_heads) == m.num_layers, f"config.model.kept_heads names {len(m.kept_heads)} layers, "
                 f"config.model.num_layers = {m.num_layers}")  # fmt: skip
        for layer, heads in enumerate(m.kept_heads):
            _require(list(heads) == sorted(set(heads)) and all(0 <= h < m.num_heads for h in heads),
                     f"config.model.kept_heads[{layer}] = {heads}: allowed are different, ascending head numbers "
                     f"below config.model.num_heads = {m.num_heads}")


def _resolve_run(c: Config):
    for key in ("probes.panel", "checkpoint.save", "checkpoint.keep"):
        section, _, field = key.partition(".")
        text = getattr(getattr(c, section), field)
        try:
            if not (key == "checkpoint.keep" and text == "all"):
                Schedule.parse(text)
        except ValueError as error:
            raise ConfigError(f"config.{key} = {error}") from None
    _require(c.steps_per_call <= max(c.steps, 1) or c.steps_per_call <= 100, f"config.steps_per_call = "
             f"{c.steps_per_call}: allowed is at most config.steps = {c.steps}")  # fmt: skip
    _require(c.data.task == "text" or c.steps * c.data.batch_size <= 2**32, f"config.steps = {c.steps} of "
             f"config.data.batch_size = {c.data.batch_size} rows: allowed is at most 2^32 rows of a generated task, "
             "after which they would come again")  # fmt: skip
    read = {"rows": c.probes.rows} | ({"repeats": c.probes.repeats} if c.data.vocab_size < SMALL_VOCAB else {})
    for key, rows in read.items():
        _require(rows <= c.data.eval_rows, f"config.probes.{key} = {rows} is more than config.data.eval_rows = "
                 f"{c.data.eval_rows}")  # fmt: skip
    o, a = c.optimizer, c.optimizer.accumulation
    _require(o.end_learning_rate <= o.learning_rate, f"config.optimizer.end_learning_rate = {o.end_learning_rate} is "
             f"more than config.optimizer.learning_rate = {o.learning_rate}")  # fmt: skip
    for key in ("b1", "b2"):
        _require(0 <= getattr(o, key) < 1, f"config.optimizer.{key} = {getattr(o, key)}: allowed is 0 to below 1")
    _require(c.data.batch_size % a == 0, f"config.data.batch_size = {c.data.batch_size} does not divide by "
             f"config.optimizer.accumulation = {a}")  # fmt: skip
    i, last = c.interventions, c.steps if c.interventions.end is None else min(c.interventions.end, c.steps)
    _require(not i.heads or i.start < last, f"config.interventions.start = {i.start}: allowed is below "
             f"config.interventions.end = {i.end} and config.steps = {c.steps}")  # fmt: skip
    for period in c.probes.periods or ():
        _require(3 <= period <= c.data.length // 2, f"config.probes.periods = {c.probes.periods}: allowed are periods "
                 f"from 3 to half of config.data.length = {c.data.length}")  # fmt: skip
