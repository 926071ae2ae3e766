"""Open a run folder, with nothing else needed: config, tokenizer, data, parameters at a step, the panel.

    run = mha_jax.load("runs/quickstart", step="best")
    logits_BTV, aux = run.forward(tokens_BT, capture=("pattern",))
"""
import contextlib
import dataclasses
import functools
import pathlib

import jax
from jax.sharding import Mesh

from mha_jax.config import Config, ConfigError
from mha_jax.data import tokenizer
from mha_jax.data.source import make_source
from mha_jax.model import transformer
from mha_jax.probes.panel import Panel, Reading
from mha_jax.probes.subject import Subject
from mha_jax.training import folder, sharding
from mha_jax.training.checkpoint import Checkpoints


@dataclasses.dataclass(frozen=True)
class Run:
    """A run on the devices at hand, which need not be those it was trained on."""

    workdir: pathlib.Path
    config: Config
    mesh: Mesh
    checkpoints: Checkpoints
    panel: Panel

    def params(self, step: int) -> tuple[dict, dict]:
        """(parameters after `step` updates, the checkpoint's meta), its hash checked. CheckpointError if unreadable."""
        shapes = jax.eval_shape(lambda: transformer.init_params(self.config.model, 0))
        abstract = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes,
                                sharding.shardings(shapes, self.mesh))  # fmt: skip
        found, meta = self.checkpoints.restore(step, {"params": abstract})
        folder.check_same_data(meta, self.panel.source)
        return found["params"], meta

    def steps(self, name: str) -> list[int]:
        """The steps that 'last', 'best', 'all' or a number names. ConfigError naming what exists."""
        return self.checkpoints.steps() if name == "all" and self.checkpoints.steps() else [self.checkpoints.find(name)]

    def at(self, step: int) -> "Snapshot":
        """The run at one saved step."""
        params, meta = self.params(step)
        return Snapshot(self, step, meta, Subject(self.config.model, params, self.mesh))


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A run at one step: what every task of the laboratory takes."""

    run: Run
    step: int
    meta: dict  # of the checkpoint: hash, tokens, data fingerprint
    subject: Subject

    @property
    def panel(self) -> Panel:
        """The run's frozen probe tokens and evaluation rows, with their lines."""
        return self.run.panel

    @property
    def params(self) -> dict:
        """Nested dict of float32 arrays."""
        return self.subject.params

    def forward(self, tokens_BT, capture=(), interventions=None, **kwargs):
        """(logits_BTV, Aux): `Subject.forward`."""
        return self.subject.forward(tokens_BT, capture, interventions, **kwargs)

    @functools.cached_property
    def reading(self) -> Reading:
        """The full panel: what training logged at this step, bit for bit on the same devices."""
        return self.panel.measure(self.params)


def load(workdir, step="last") -> Snapshot:
    """A run at a step: 'last', 'best' (lowest evaluation loss) or a saved number. ConfigError naming what exists."""
    config = folder.read_config(folder.absolute(workdir))
    with contextlib.suppress(RuntimeError):  # JAX has started, in a notebook that opens another run: its devices stand
        sharding.use_cpu_devices(config)
    run = open_run(workdir)
    if str(step) == "all":
        raise ConfigError("step = 'all': a snapshot is one step; allowed are last, best, or a saved step")
    return run.at(run.steps(str(step))[0])


def open_run(workdir) -> Run:
    """Opens a run folder. ConfigError when it holds no run or its data is not there."""
    workdir = folder.absolute(workdir)
    config = folder.read_config(workdir)
    mesh = sharding.evaluation_mesh(config)
    saved = workdir / "tokenizer.json"
    source = make_source(config, mesh, tokenizer.load(saved) if saved.exists() else None)
    return Run(workdir, config, mesh, Checkpoints(workdir, config.checkpoint), Panel(config, source, mesh))
