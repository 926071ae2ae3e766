"""Open a run folder, with nothing else needed: config, tokenizer, data, parameters at a step, the panel."""
import dataclasses
import pathlib

import jax
from jax.sharding import Mesh

from mha_jax.config import Config
from mha_jax.data.source import make_source
from mha_jax.data.tokenizer import Tokenizer
from mha_jax.model import transformer
from mha_jax.probes.panel import Panel, Reading
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
        folder.check_same_data(meta, self.panel.source.fingerprint)
        return found["params"], meta

    def steps(self, name: str) -> list[int]:
        """The steps that 'last', 'best', 'all' or a number names. ConfigError naming what exists."""
        return self.checkpoints.steps() if name == "all" and self.checkpoints.steps() else [self.checkpoints.find(name)]

    def measure(self, step: int) -> tuple[Reading, dict]:
        """(the full panel at a saved step, the checkpoint's meta): what training logged there, bit for bit on the
        same devices."""
        params, meta = self.params(step)
        return self.panel.measure(params), meta


def open_run(workdir) -> Run:
    """Opens a run folder. ConfigError when it holds no run or its data is not there."""
    workdir = folder.absolute(workdir)
    config = folder.read_config(workdir)
    mesh = sharding.evaluation_mesh(config)
    saved = workdir / "tokenizer.json"
    source = make_source(config, mesh, Tokenizer.load(saved) if saved.exists() else None)
    return Run(workdir, config, mesh, Checkpoints(workdir, config.checkpoint), Panel(config, source, mesh))
