"""--task=prune --method=gates: hard-concrete gates (Voita et al. 2019) at several penalties, and what they are worth.

Each penalty keeps some heads. Beside the loss of the pruned model stands that of a model with the same heads, trained
from scratch on as many tokens under another seed: if it is as good, the trained heads were not what mattered.
"""
import dataclasses
import math

import numpy as np

from mha_jax.config import Config, ConfigError, InterventionsConfig, to_dict
from mha_jax.data.cache import digest
from mha_jax.laboratory.result import Result, cost_of, evaluation_rows, provenance
from mha_jax.pruning import ablation, curves, sets
from mha_jax.pruning import gates as hard_concrete
from mha_jax.run import Snapshot, open_run
from mha_jax.training import loop, optimizer
from mha_jax.training.console import Console
from mha_jax.training.sharding import make_mesh
from mha_jax.validation import resolve

PENALTIES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)  # nats a head
STEPS = 300
LEARNING_RATE = 0.1


def gates(snapshot: Snapshot, *, penalties=PENALTIES, gate_steps: int = STEPS, train_params: bool = False,
          from_scratch: bool = True, rows: int | None = None, seed: int = 0, say=lambda message: None,
          progress=lambda done, total: None) -> Result:  # fmt: skip
    """Table `front`: a row a penalty, with the survivors by name, loss and ICL without the others, and the loss of the
    model trained from scratch. train_params: the model learns along with the gates, at the run's last learning rate.

    The models from scratch are run folders in eval/prune/scratch, so a second call finds them done. ConfigError for a
    penalty below 0 or no steps.
    """
    if not penalties or gate_steps < 1 or not all(0 <= p < math.inf for p in penalties):
        raise ConfigError(f"--penalties={','.join(map(str, penalties))}, --gate_steps={gate_steps}: allowed are some "
                          "finite penalties of 0 or more, and 1 or more steps")  # fmt: skip
    subject, config = snapshot.subject, snapshot.run.config
    if from_scratch:
        try:
            make_mesh(scratch_config(snapshot, subject.heads, snapshot.step))
        except ConfigError as error:
            raise ConfigError(f"models from scratch cannot be trained here: {error}; --noscratch leaves them out") \
                from None  # fmt: skip
    tokens_RU = evaluation_rows(snapshot, rows)
    source = snapshot.panel.source

    def batch(step):
        stacked = source.batches(config.steps + step, 1)  # rows that come after those of the run
        return {k: None if v is None else v[0] for k, v in stacked.items()}

    last = float(optimizer.learning_rate(config.optimizer, config.steps)(config.steps))
    if train_params and not last:
        raise ConfigError("--train_params: the run's last learning rate is 0, at which nothing would be learnt")
    final = dataclasses.replace(config.optimizer, schedule="constant", warmup_steps=0, learning_rate=last)
    of_params = optimizer.make(final, gate_steps) if train_params else None
    total = len(penalties) * gate_steps
    points = hard_concrete.front(subject, batch, penalties, steps=gate_steps, learning_rate=LEARNING_RATE, seed=seed,
                                 of_params=of_params, progress=lambda done: progress(done, total))  # fmt: skip
    whole = float(ablation.whole_losses(subject, tokens_RU).mean(dtype=np.float64))
    table, scratch_loss = [], {}
    for point in points:
        kept = point.result.survivors
        pruned = dataclasses.replace(subject, params=point.result.params)
        gone = tuple(h for h in subject.heads if h not in kept)
        found = ablation.sweep(pruned, tokens_RU, sets.mask(subject, [gone]), curves.ZERO)
        cost = cost_of(snapshot, found.whole_RT, found.loss_PSRT, seed)
        steps = snapshot.step + (gate_steps if train_params else 0)
        if from_scratch and kept and tuple(kept) not in scratch_loss:
            say(f"training {len(kept)} heads from scratch for {steps} steps, as long as the run took "
                "(--noscratch leaves this out)")  # fmt: skip
            scratch_loss[tuple(kept)] = train_from_scratch(snapshot, kept, steps, tokens_RU)
        table.append({
            "penalty": point.penalty, "kept": len(kept), "of": len(subject.heads), "loss": cost.loss_S[0],
            "loss_change": cost.loss_S[0] - whole, "icl": cost.icl_S[0],
            "from_scratch_loss": scratch_loss.get(tuple(kept)), "survivors": " ".join(point.names),
        })  # fmt: skip
    facts = provenance(snapshot) | {
        "method": "gates", "train_params": train_params, "gate_steps": gate_steps, "gate_learning_rate": LEARNING_RATE,
        "sequences": len(tokens_RU), "seed": seed, "survives": "gate without noise above 0.5",
        "objective": "mean loss in nats + penalty x sum of P(open)",
        "from_scratch": f"the same heads of the same layers, seed {config.seed ^ 1}, {snapshot.step} steps"
                        + (f" + {gate_steps}" if train_params else ""),
    }  # fmt: skip
    return Result("prune", facts, {"front": table}, {
        "open_PLN": np.stack([p.result.open_LN for p in points]),
        "gate_losses_PS": np.stack([p.result.losses_S for p in points]),
    })  # fmt: skip


def scratch_config(snapshot: Snapshot, kept, steps: int) -> Config:
    """The run's config with these heads alone, another seed, none held: a model that is trained for `steps` steps."""
    config, L = snapshot.run.config, snapshot.run.config.model.num_layers
    layers = tuple(tuple(n for layer, n in sorted(kept) if layer == i) for i in range(L))
    tokenizer = snapshot.run.workdir / "tokenizer.json"
    return resolve(dataclasses.replace(
        config, name=f"{config.name} from scratch", steps=steps, seed=config.seed ^ 1,
        model=dataclasses.replace(config.model, kept_heads=layers),
        data=dataclasses.replace(config.data, **({"tokenizer": str(tokenizer)} if tokenizer.exists() else {})),
        probes=dataclasses.replace(config.probes, panel=str(max(steps, 1)), induction_every=max(steps, 1)),
        checkpoint=dataclasses.replace(config.checkpoint, save=str(max(steps, 1)), keep="all"),
        tracking=dataclasses.replace(config.tracking, wandb="disabled"), interventions=InterventionsConfig(),
    ))  # fmt: skip


def train_from_scratch(snapshot: Snapshot, kept, steps: int, tokens_RU) -> float:
    """Mean loss in nats of a new model with these heads alone, trained for `steps` steps as the run was."""
    config = scratch_config(snapshot, kept, steps)
    name = f"{len(kept)}_heads_{steps}_steps_{digest(to_dict(config))[:8]}"  # what is made of another config is another
    folder = snapshot.run.workdir / "eval" / "prune" / "scratch" / name
    if not (folder / "summary.json").exists():
        loop.train(config, folder, console=Console(active=False))
    trained = open_run(folder).at(steps).subject
    return float(ablation.whole_losses(trained, tokens_RU).mean(dtype=np.float64))
