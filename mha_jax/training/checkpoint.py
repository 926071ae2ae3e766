"""Checkpoints by Orbax: plain dicts, each with its step and a hash of its content, never trusted unread."""
import pathlib
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy as policies

from mha_jax.config import CheckpointConfig, ConfigError
from mha_jax.schedule import Schedule
from mha_jax.training.folder import DEFINITIONS, first_line, free_place, read_json

ITEMS = ("params", "optimizer", "meta")
# What lies beside the parameters: the first six come from the loop, `save` adds the others.
META = ("tokens", "seconds", "probe_seconds", "compile_seconds", "data", "config", "step", "hash", "params_hash",
        "eval_loss")  # fmt: skip


class CheckpointError(RuntimeError):
    """A save that did not land or a checkpoint that cannot be read; the message names path and step."""


@jax.jit
def _leaf_hash(leaf: jax.Array, salt: jax.Array) -> jax.Array:
    """Two 32-bit lanes: sums, modulo 2^32, of every element's bits mixed with its position and its leaf's salt.

    A sum does not depend on order, so the hash is the same on any mesh; mixing makes moved values count.
    """
    bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")).astype(jnp.uint32)
    place = jnp.zeros(leaf.shape, jnp.uint32)
    for axis, size in enumerate(leaf.shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
    lanes = []
    for odd in (0x9E3779B1, 0x85EBCA77):
        h = (bits ^ _mix(place * jnp.uint32(odd) + salt)) * jnp.uint32(odd)
        lanes.append(_mix(h).sum(dtype=jnp.uint32))
    return jnp.stack(lanes)


def _mix(h):
    """The finalizer of MurmurHash3 (Appleby): every input bit reaches every output bit."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def content_hash(tree) -> str:
    """16 hex digits over the bits of every leaf, the same on any mesh; a flipped bit otherwise restores silently."""
    # A program per shape instead of one for the tree: that one takes seconds to compile.
    parts = [_leaf_hash(leaf, jnp.uint32(zlib.crc32(jax.tree_util.keystr(path).encode())))
             for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]  # fmt: skip
    lanes = np.sum([np.asarray(p) for p in parts], axis=0, dtype=np.uint32)
    return "".join(f"{int(x):08x}" for x in lanes)


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, workdir: pathlib.Path, cfg: CheckpointConfig, last: int = 0):
        """`last`: the run's number of steps, which `keep` schedules refer to; 0 when only reading."""
        self._workdir, self.folder = workdir, workdir / "checkpoints"
        self._cfg, self._last = cfg, last
        self._manager = None

    def steps(self) -> list[int]:
        """Steps that have a folder here, ascending; not yet known to be whole."""
        if not self.folder.is_dir():
            return []
        return sorted(int(p.name) for p in self.folder.iterdir() if p.name.isdecimal())

    def save(self, step: int, state: dict, meta: dict, eval_loss: float | None):
        """Saves and waits until it is durable. CheckpointError unless it landed.

        eval_loss: what `best` goes by; None or a non-finite one never wins.
        """
        loss = eval_loss if eval_loss is not None and np.isfinite(eval_loss) else float("inf")
        saved = {"params": state["params"], "optimizer": state["optimizer"]}
        meta = meta | {"step": step, "hash": content_hash(saved), "params_hash": content_hash(state["params"]),
                       "eval_loss": None if np.isinf(loss) else loss, "definitions": DEFINITIONS}  # fmt: skip
        try:
            landed = self._writer().save(
                step,
                args=ocp.args.Composite(
                    params=ocp.args.StandardSave(state["params"]),
                    optimizer=ocp.args.StandardSave(state["optimizer"]),
                    meta=ocp.args.JsonSave(meta),
                ),
                metrics={"loss": loss},
            )
            self._writer().wait_until_finished()
        except Exception as error:
            raise CheckpointError(f"saving step {step} to {self.folder} failed: {first_line(error)}") from error
        # Orbax returns False, and only that, for a step it already has or that is below the newest.
        if not landed or not (self.folder / str(step)).is_dir():
            raise CheckpointError(f"saving step {step} to {self.folder} failed: nothing was written")

    def _writer(self) -> ocp.CheckpointManager:
        if self._manager is None:
            cfg = self._cfg
            if cfg.keep == "all":
                keep = policies.PreserveAll()
            else:
                schedule = Schedule.parse(cfg.keep)
                steps = [s for s in range(self._last + 1) if schedule.is_due(s, self._last)]
                kept = [policies.LatestN(cfg.keep_latest), policies.CustomSteps(steps)]
                if cfg.keep_best:
                    kept.append(policies.BestN(get_metric_fn=_loss_of, reverse=True, n=cfg.keep_best))
                keep = policies.AnyPreservationPolicy(kept)
            options = ocp.CheckpointManagerOptions(
                preservation_policy=keep, best_fn=_loss_of, best_mode="min", cleanup_tmp_directories=True,
                enable_async_checkpointing=False,
            )  # fmt: skip
            self._manager = ocp.CheckpointManager(self.folder, options=options, item_names=ITEMS)
        return self._manager

    def meta(self, step: int) -> dict:
        """What was saved beside the parameters, `META`. CheckpointError if unreadable or incomplete."""
        try:
            meta = read_json(self.folder / str(step) / "meta" / "metadata")
        except (OSError, ConfigError) as error:
            raise CheckpointError(f"{self.folder}/{step} cannot be read: {error}") from error
        missing = [key for key in META if key not in meta]
        if missing:
            raise CheckpointError(f"{self.folder}/{step} cannot be read: its metadata has no {', '.join(missing)}")
        return meta

    def restore(self, step: int, abstract: dict) -> tuple[dict, dict]:
        """({items of `abstract`}, meta) of a step onto the shardings of `abstract`, its hash checked.

        abstract: {'params': ...} and, to resume, 'optimizer' too. CheckpointError when anything is missing,
        of another shape, or not what was saved.
        """
        meta = self.meta(step)
        try:
            with ocp.Checkpointer(ocp.CompositeCheckpointHandler(*abstract)) as reader:
                found = reader.restore(
                    self.folder / str(step),
                    ocp.args.Composite(**{name: ocp.args.StandardRestore(tree) for name, tree in abstract.items()}),
                )
        except Exception as error:
            raise CheckpointError(f"{self.folder}/{step} cannot be read: {first_line(error)}") from error
        found = {name: found[name] for name in abstract}
        expected, actual = meta.get("hash"), content_hash(found)
        if set(abstract) == {"params"}:
            expected, actual = meta.get("params_hash"), content_hash(found["params"])
        if meta.get("step") != step or expected != actual:
            raise CheckpointError(f"{self.folder}/{step} is not what was saved: it says step {meta.get('step')} and "
                                  f"hash {expected}, its content is {actual}")  # fmt: skip
        return found, meta

    def restore_newest(self, abstract: dict, warn) -> tuple[int, dict, dict] | None:
        """(step, items, meta) of the newest checkpoint that is whole, or None.

        Those that are not are named through `warn` and moved to damaged/, so that later saves can take their place.
        CheckpointError, and nothing moved, when none is whole though one was finished: that is more likely a changed
        library or a full disk than damage, and beginning again at step 0 would throw the run away.
        """
        bad, found = {}, None
        for step in reversed(self.steps()):
            try:
                found = (step, *self.restore(step, abstract))
                break
            except CheckpointError as error:
                bad[step] = error
        finished = [s for s in bad if (self.folder / str(s) / "meta" / "metadata").is_file()]
        if found is None and finished:
            raise CheckpointError(f"no checkpoint can be read, the newest because {bad[finished[0]]}; to begin again, "
                                  f"move {self.folder} away")  # fmt: skip
        for step, error in bad.items():
            aside = free_place(self._workdir, str(step))
            warn(f"checkpoint {step} skipped and moved to {aside}: {error}")
            if jax.process_index() == 0:
                (self.folder / str(step)).rename(aside)
        return found

    def find(self, name: str) -> int:
        """The step of 'last', 'best' (lowest evaluation loss) or a number. ConfigError naming what exists."""
        steps = self.steps()
        if not steps:
            raise ConfigError(f"{self.folder}: there is no checkpoint")
        if name == "last":
            return steps[-1]
        if name == "best":
            losses = {s: self.meta(s)["eval_loss"] for s in steps}
            losses = {s: loss for s, loss in losses.items() if loss is not None}
            if not losses:
                raise ConfigError(f"--step=best: no checkpoint in {self.folder} has an evaluation loss")
            return min(losses, key=losses.get)
        if not name.isdecimal() or int(name) not in steps:
            raise ConfigError(f"--step={name}: allowed are last, best, all and the saved steps "
                              f"{', '.join(map(str, steps))}")  # fmt: skip
        return int(name)


def _loss_of(metrics: dict) -> float:
    return metrics["loss"]
