"""--task=remove: heads physically gone, in a new run folder that trains, evaluates and prunes again."""
import dataclasses
import json
import math
import pathlib
import shutil
import statistics
import time

import jax
import numpy as np

from mha_jax import config as configs
from mha_jax.config import Config, ConfigError
from mha_jax.laboratory.result import Result, provenance
from mha_jax.model import surgery, transformer
from mha_jax.probes.panel import head_name
from mha_jax.probes.subject import Subject
from mha_jax.pruning import ablation, curves, sets
from mha_jax.run import Snapshot
from mha_jax.training import folder, state
from mha_jax.training.checkpoint import Checkpoints
from mha_jax.training.progress import Progress
from mha_jax.validation import resolve

ROUNDS = 7  # of the paired timing
CONFIG_PY = '''"""{name}: what is left of {source} at step {step} without {heads}.

Command python train.py --config={folder}/config.py --workdir={folder} --config.steps=N
"""
import json
import pathlib

from mha_jax import config


def get_config():
    return config.from_dict(json.loads((pathlib.Path(__file__).parent / "config.json").read_text()))
'''


def remove(snapshot: Snapshot, heads, out=None, say=lambda message: None) -> Result:
    """Cuts `heads`, (layer, query head) pairs by the original numbers, and writes the new run folder `out`.

    Its one checkpoint is of the same step, optimizer moments cut alike, so that training goes on. A KV head goes with
    its last query head. ConfigError for a head that never existed, for nothing to remove, or a folder that exists.
    """
    run, subject = snapshot.run, snapshot.subject
    gone = surgery.already_gone(run.config.model, heads)
    if gone:
        say(f"gone already: {_names(gone)}")
    cut = tuple(sorted(set(heads) - set(gone)))
    if not cut:
        raise ConfigError("nothing to remove: " + ("all of them are gone already" if gone else "no head is named"))
    left = len(subject.heads) - len(cut)
    if not left:
        raise ConfigError("--heads: all heads that are left; nothing would remain to be measured")
    at = folder.absolute(out) if out else run.workdir.with_name(f"{run.workdir.name}_{left}of{len(subject.heads)}")
    if at.exists() or run.checkpoints.folder in at.parents:
        raise ConfigError(f"--out={at}: exists already or lies among the checkpoints; name another folder")
    found, meta = run.checkpoints.restore(snapshot.step, _abstract(run))
    tree, model = surgery.remove_heads(found, run.config.model, cut)
    new = resolve(dataclasses.replace(run.config, name=f"{run.config.name} without {_names(cut)}", model=model,
                                      interventions=configs.InterventionsConfig()))  # fmt: skip
    after = dataclasses.replace(subject, cfg=new.model, params=tree["params"])
    compared = compare(snapshot, after, cut)
    _write(at, new, tree, meta, snapshot, cut, compared["loss_removed"])
    length = run.config.data.length
    table = [
        {"what": what, "before": before, "after": now, "share": now / before}
        for what, before, now in (
            ("heads", len(subject.heads), left),
            ("KV heads", len(sets.by_group(subject)), len(sets.by_group(after))),
            ("parameters", transformer.count_params(run.config.model), transformer.count_params(new.model)),
            (f"KV-cache bytes, {length} tokens in float32", surgery.kv_cache_bytes(run.config.model, length, 4),
             surgery.kv_cache_bytes(new.model, length, 4)),
            ("seconds of one evaluation", *compared.pop("seconds")),
            ("evaluation loss", snapshot.reading.values["eval/loss"], compared["loss_removed"]),
        )
    ]  # fmt: skip
    facts = provenance(snapshot) | {
        "removed": [head_name(*h) for h in cut],
        "kept_heads": [list(layer) for layer in configs.kept_heads(new.model)],
        "folder": str(at),
        "timing": f"medians of {ROUNDS} paired rounds",
    }
    return Result("remove", facts | compared, {"before_after": table})


def from_order(path, order: str | None, keep: str | None, subject: Subject) -> list[tuple[int, int]]:
    """The heads that go so that `keep` (a share such as '60%', or a number of heads) stay, by an order of a prune
    result. ConfigError for a file that is none, an order that it does not have, or a share out of range."""
    path = pathlib.Path(path)
    try:
        table = json.loads(path.read_text())["tables"]["orders"]
        listed = sorted((row["place"], row["order"], row["heads"]) for row in table)
        if not listed:
            raise ValueError("it has no order")
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = folder.first_line(error)
        raise ConfigError(f"--from={path}: not a result of --task=prune with orders ({reason})") from None
    names = list(dict.fromkeys(row["order"] for row in table))
    order = order or names[0]
    if order not in names:
        raise ConfigError(f"--orders={order}: {path} has {', '.join(names)}")
    if keep is None:
        raise ConfigError("--from goes with --keep=60%, the share or number of heads that stay")
    try:
        stay = float(keep[:-1]) / 100 * len(subject.heads) if keep.endswith("%") else float(int(keep))
    except ValueError:
        stay = math.nan
    have = len(subject.heads)
    if not 1 <= round(0 if math.isnan(stay) else stay) < have:
        raise ConfigError(f"--keep={keep}: allowed is a share such as 60%, or 1 to {have - 1} of the {have} heads")
    gone, possible = [], []
    for _, _, heads in (row for row in listed if row[1] == order):
        unit = surgery.parse_heads(heads.replace(" ", ","), subject.cfg.num_layers, subject.cfg.num_heads, "--from")
        gone += [head for head in unit if head in subject.heads]  # the others went in an earlier removal
        possible.append(have - len(gone))
        if possible[-1] == round(stay):
            return gone
    near = sorted({n for n in possible if 0 < n < have}, key=lambda n: abs(n - stay))[:2]
    raise ConfigError(f"--keep={keep}: the order {order} in {path} cannot leave {round(stay)} of {have} heads; nearest "
                      f"are {', '.join(map(str, sorted(near))) or 'none'}")  # fmt: skip


def compare(snapshot: Snapshot, after: Subject, cut) -> dict:
    """The masked and the removed model on the evaluation rows: losses, their largest difference, seconds in pairs."""
    before, tokens_RU = snapshot.subject, snapshot.panel.evaluation.tokens_RU
    masked = ablation.sweep(before, tokens_RU, sets.mask(before, [cut]), curves.ZERO).loss_PSRT[0, 0]
    removed = ablation.whole_losses(after, tokens_RU)
    rounds = []
    ablation.whole_losses(before, tokens_RU)
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        ablation.whole_losses(before, tokens_RU)
        middle = time.perf_counter()
        ablation.whole_losses(after, tokens_RU)
        rounds.append((middle - begin, time.perf_counter() - middle))
    return {
        "loss_masked": float(masked.mean(dtype=np.float64)),
        "loss_removed": float(removed.mean(dtype=np.float64)),
        "largest_difference": float(np.abs(masked - removed).max()),
        "seconds": [statistics.median(r[i] for r in rounds) for i in range(2)],
    }


def _abstract(run) -> dict:
    found = state.abstract_state(run.config, run.mesh)
    return {name: found[name] for name in ("params", "optimizer")}


def _write(at, new: Config, tree, meta: dict, snapshot: Snapshot, cut, loss: float):
    """config.json, config.py, tokenizer, where it comes from, and the checkpoint last: a folder without one is no run
    that could be mistaken for a whole one."""
    final, at = at, at.with_name(f".{at.name}.half")  # a folder under its own name is whole
    shutil.rmtree(at, ignore_errors=True)
    at.mkdir(parents=True)
    source = snapshot.run.workdir
    folder.write_json(at / "config.json", configs.to_dict(new))
    title = new.name.replace("\\", "/").replace('"', "'")  # it stands in a docstring
    folder.write_atomically(at / "config.py", CONFIG_PY.format(
        name=title, source=source.name, step=snapshot.step, heads=_names(cut), folder=final))  # fmt: skip
    folder.write_json(at / "removed.json", {"run": str(source), "step": snapshot.step, "hash": meta["hash"],
                                            "heads": [head_name(*h) for h in cut]})  # fmt: skip
    if (source / "tokenizer.json").exists():
        shutil.copy(source / "tokenizer.json", at / "tokenizer.json")
    kept = {"data": meta["data"]}  # and no seconds: they were another model's
    kept |= dataclasses.asdict(Progress(snapshot.step, tokens=meta["tokens"], untimed_tokens=meta["tokens"]))
    tree = jax.tree.map(jax.numpy.asarray, tree)
    Checkpoints(at, new.checkpoint, new.steps).save(
        snapshot.step, tree, kept | {"config": configs.to_dict(new)}, loss
    )  # fmt: skip
    at.rename(final)


def _names(heads) -> str:
    return " ".join(head_name(*h) for h in heads)
