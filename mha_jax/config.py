"""Every setting of a run, typed.

A config file defines `get_config()` returning a `Config`; `--config.section.key=value` overrides one field.
`mha_jax.validation.resolve` checks the whole. All messages are one line: key, value, what is allowed, and the
nearest right name.
"""
import dataclasses
import difflib
from typing import Optional

SMALL_VOCAB = 16  # below it random blocks repeat too often: prefix matching is scored on the task's own sequences


class ConfigError(ValueError):
    """Bad config or input. The commands print the message on one line and exit with code 2."""


# Plain annotations only: config_flags cannot read Literal or quoted types, so choices are in `validation.CHOICES`.
@dataclasses.dataclass
class ModelConfig:
    num_layers: int = 2
    d_model: int = 64
    num_heads: int = 4
    num_kv_heads: int = 4  # K: num_heads is MHA, 1 is MQA, between is GQA
    head_dim: Optional[int] = None  # default d_model / num_heads
    vocab_size: Optional[int] = None  # default: what the data has
    positions: str = "rope"
    max_length: Optional[int] = None  # rows of a learned position table; default data.length
    rope_theta: float = 10_000.0
    mlp: str = "none"
    d_mlp: Optional[int] = None  # default 4 d_model, or 8/3 d_model rounded up to 8 for swiglu
    norm: str = "layer"
    norm_eps: float = 1e-5
    bias: bool = False  # in linear maps and in LayerNorm
    tied: bool = False  # unembedding = embedding transposed
    smeared_key: bool = False  # k_j <- s k_j + (1 - s) k_{j-1}: gives one layer what two layers compose
    qk_norm: bool = False
    sink: bool = False  # one learned logit per head in the softmax denominator
    window: Optional[int] = None  # a query sees itself and the window - 1 tokens before it
    init: str = "fan_in"  # N(0, 1/fan_in), or gpt2: N(0, 0.02^2) with residual outputs / sqrt(2 L)
    attention: str = "auto"
    dtype: str = "float32"  # of the computation; parameters, softmax and loss are always float32
    matmul_precision: str = "default"  # of float32 products while training; probes always use highest
    kept_heads: Optional[tuple[tuple[int, ...], ...]] = None  # per layer, the original numbers of heads that remain


@dataclasses.dataclass
class DataConfig:
    task: str = "repeat"
    length: int = 64  # T predictions a row, from T + 1 tokens
    batch_size: int = 64  # rows of one optimizer step, over all devices and micro-batches
    vocab_size: int = 64  # tokens of a synthetic task (states of `markov`), or size of the BPE
    eval_rows: int = 128  # frozen evaluation rows
    period_min: int = 8  # repeat
    period_max: int = 32
    block: str = "distinct"
    num_triggers: int = 5  # trigger
    trigger_rate: float = 0.25
    dirichlet_alpha: float = 0.1
    table_seed: int = 0
    random_triggers: bool = False
    trigger_prior: float = 0.1
    dataset: str = "stdlib"  # text: stdlib, files:GLOB, or what TFDS has prepared (a name or a directory)
    field: Optional[str] = None  # where the text is; default 'text', or a TFDS dataset's only text feature
    validation: str = "auto"  # held out: 5% or a number of documents; auto: the dataset's own split, or else 5%
    tokenizer: str = "bpe"  # bpe (trained on the corpus), bytes, or the path of a tokenizer.json
    packing: str = "concatenated"
    cache_dir: str = "~/.cache/mha_jax"


@dataclasses.dataclass
class OptimizerConfig:
    learning_rate: float = 2e-3  # peak
    end_learning_rate: float = 2e-4  # reached at the last step
    warmup_steps: int = 100
    schedule: str = "cosine"
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0  # on matrices only: never on biases, norms, gates, sinks or position tables
    clip_norm: float = 1.0
    accumulation: int = 1  # micro-batches of one step; the mean is over tokens, not over micro-batches


@dataclasses.dataclass
class MeshConfig:
    data: Optional[int] = None  # default: the devices the other axes leave
    fsdp: int = 1
    tensor: int = 1
    platform: str = "auto"


@dataclasses.dataclass
class ProbesConfig:
    panel: str = "50"  # schedule of the full panel
    induction_every: int = 10  # prefix matching alone, until formed
    rows: int = 32  # evaluation rows whose attention patterns are read
    repeats: int = 8  # repeated blocks per period
    periods: Optional[tuple[int, ...]] = None  # default: a spread with at least two copies inside the length


@dataclasses.dataclass
class InterventionsConfig:
    heads: str = ""  # held while training: 1.0,1.3 or L1H0,L1H3; none: ''
    kind: str = "zero"
    start: int = 0  # first step
    end: Optional[int] = None  # the step before which it ends; default: never


@dataclasses.dataclass
class CheckpointConfig:
    save: str = "500"
    keep: str = "all"  # steps never deleted: all, or a schedule
    keep_latest: int = 2
    keep_best: int = 1


@dataclasses.dataclass
class TrackingConfig:
    log_every: int = 10
    wandb: str = "auto"
    project: str = "mha_jax"
    entity: Optional[str] = None
    group: Optional[str] = None  # default: task and attention variant
    timeout: float = 60.0  # seconds that starting W&B may take


@dataclasses.dataclass
class Config:
    name: str = "default"
    seed: int = 0
    steps: int = 1000
    steps_per_call: int = 10  # optimizer steps in one device call
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    probes: ProbesConfig = dataclasses.field(default_factory=ProbesConfig)
    interventions: InterventionsConfig = dataclasses.field(default_factory=InterventionsConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = dataclasses.field(default_factory=TrackingConfig)


def kept_heads(model: ModelConfig) -> tuple[tuple[int, ...], ...]:
    """The query heads that remain in each layer, by their original numbers."""
    return (tuple(range(model.num_heads)),) * model.num_layers if model.kept_heads is None else model.kept_heads


def flat(config) -> dict[str, object]:
    """The config as {'model.num_heads': 4, ...}: what W&B shows and what two configs are compared by."""
    out = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            out |= {f"{field.name}.{k}": v for k, v in flat(value).items()}
        else:
            out[field.name] = value
    return out


def to_dict(config: Config) -> dict:
    """Nested plain dict, for config.json."""
    return dataclasses.asdict(config)


def from_dict(values: dict, cls=Config, path: str = ""):
    """The inverse of `to_dict`; a key this version does not know is an error, not dropped."""
    known = {f.name: f for f in dataclasses.fields(cls)}
    for key in values:
        if key not in known:
            raise unknown_key(f"{path}{key}")
    kwargs = {}
    for key, value in values.items():
        section = known[key].type
        if dataclasses.is_dataclass(section):
            if not isinstance(value, dict):
                raise ConfigError(f"config.{path}{key} = {value!r}: allowed is a section with its keys")
            kwargs[key] = from_dict(value, section, f"{path}{key}.")
        else:
            kwargs[key] = _tuples(value)
    return cls(**kwargs)


def _tuples(value):
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def unknown_key(key: str) -> ConfigError:
    """The error for a key that does not exist, naming the nearest that does."""
    keys = list(flat(Config()))
    last = key.rpartition(".")[2]
    same = [k for k in keys if k.rpartition(".")[2] == last]  # the right key in the wrong section
    near = difflib.get_close_matches(key, same or keys, 1, 0.0)
    return ConfigError(f"config.{key}: no such key; did you mean config.{near[0]}?")
