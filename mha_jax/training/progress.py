"""What a run counts as it goes, and what it says of itself when it starts."""
import dataclasses

import jax

from mha_jax.config import Config
from mha_jax.model import transformer
from mha_jax.training import state
from mha_jax.training.tracking import variant


@dataclasses.dataclass
class Progress:
    """What a run has counted. `step` and `tokens` are exact; seconds exclude compilation."""

    step: int = 0
    tokens: int = 0
    untimed_tokens: int = 0  # of these, seen by a model with more heads: heads were removed since
    seconds: float = 0.0
    probe_seconds: float = 0.0
    input_seconds: float = 0.0  # waiting for the rows of the next steps
    compile_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Of this model."""
        return (self.tokens - self.untimed_tokens) / max(self.seconds, 1e-9)

    def share(self, seconds: float) -> float:
        """Of the time of the run."""
        return seconds / max(self.seconds, 1e-9)

    @classmethod
    def of_checkpoint(cls, meta: dict) -> "Progress":
        """Where the checkpoint stands; what an older version did not count is 0."""
        return cls(**{field.name: meta.get(field.name, 0) for field in dataclasses.fields(cls)})


def start_lines(config: Config, mesh) -> list[str]:
    """The model, the devices, and what of the config has consequences that its values do not show."""
    devices, o, i = jax.devices(), config.optimizer, config.interventions
    lines = [
        f"{config.name}: {variant(config.model)}, {transformer.count_params(config.model):,} parameters, on "
        f"{len(devices)} {devices[0].platform} device(s) ({devices[0].device_kind}), mesh {dict(mesh.shape)}"
    ]
    if config.model.num_kv_heads % config.mesh.tensor:
        lines.append(f"K/V are replicated: config.model.num_kv_heads = {config.model.num_kv_heads} does not divide by "
                     f"config.mesh.tensor = {config.mesh.tensor}")  # fmt: skip
    if o.warmup_steps >= config.steps > 0:
        lines.append(f"warning: config.optimizer.warmup_steps = {o.warmup_steps} is not below config.steps = "
                     f"{config.steps}: the learning rate only rises")  # fmt: skip
    if i.heads:
        until = f"to step {i.end - 1}" if i.end is not None else "on"
        lines.append(f"heads {i.heads} are held at {i.kind} from step {i.start} {until}; probes see the free model")
    if o.weight_decay:
        lines.append(f"weight decay {o.weight_decay} on {', '.join(state.decayed_names(config))}")
    return lines
