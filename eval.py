"""Measure a trained run, from its folder alone and on whatever devices there are.

    python eval.py --workdir=runs/NAME --task=TASK [--step=last|best|all|N] [--out=DIR]

heads    every score of every head, what it is in plain words, circuits, where it looks
icl      loss by position and the ICL score beside the in-context unigram's and Bayes's
ablate   what breaks without a head, a KV group, a layer, a set (--heads=0.1,1.3), or an edge between two heads
         [--replacement=zero,mean,resample,uniform,tie --downstream=live,frozen --rows=N --controls=N --seed=N]
prune    how many heads can go, by which order
         [--unit=head|group --orders=example,greedy,... --rows=N --score_rows=N --seed=N],
         or by learned gates [--method=gates --penalties=0.1,1 --gate_steps=N --train_params --noscratch]
remove   heads physically gone, in a new run folder --out [--heads=0.1,1.3 | --from=FILE --keep=60% --orders=NAME]
all      all of these but remove
Results go to WORKDIR/eval/TASK as JSON, CSV and PNG.
Exit codes: 0 done; 2 bad input; 3 a loss was not finite; 4 a checkpoint cannot be read.
"""
import difflib

from absl import flags

from mha_jax import command
from mha_jax.config import ConfigError

# Which flags belong to which task: one that does not is an error, not ignored.
OPTIONS = {
    "heads": ("seed",),
    "icl": (),
    "ablate": ("heads", "replacement", "downstream", "rows", "controls", "seed"),
    "prune": ("unit", "orders", "rows", "score_rows", "seed"),
    "gates": ("penalties", "gate_steps", "train_params", "scratch", "rows", "seed"),
    "remove": ("heads", "from", "keep", "orders"),
    "all": (),
}
NAMES = {"replacement": "replacements", "from": "from_file", "scratch": "from_scratch"}  # of the Python functions
TASKS = tuple(task for task in OPTIONS if task != "gates")

WORKDIR = flags.DEFINE_string("workdir", None, "run folder")
TASK = flags.DEFINE_string("task", None, f"one of {', '.join(TASKS)}")
STEP = flags.DEFINE_string("step", "last", "last, best (lowest evaluation loss), all, or a saved step")
OUT = flags.DEFINE_string("out", None, "folder for the results; default WORKDIR/eval/TASK; of remove, the new run")
METHOD = flags.DEFINE_enum("method", "orders", ["orders", "gates"], "of prune: orders of removal, or learned gates")
flags.DEFINE_string("heads", None, "heads as 0.1,1.3 or L0H1,L1H3, by their original numbers")
flags.DEFINE_list("replacement", None, "of ablate: zero, mean, resample, uniform, tie; default all")
flags.DEFINE_list("downstream", None, "of ablate: live, frozen; default both")
flags.DEFINE_integer("rows", None, "how many evaluation rows; default all", lower_bound=2)
flags.DEFINE_integer("score_rows", None, "of prune: calibration rows that orders are chosen on; default 64",
                     lower_bound=2)  # fmt: skip
flags.DEFINE_integer("controls", None, "of ablate: random sets to compare a set with; default 200", lower_bound=1)
flags.DEFINE_string("unit", None, "of prune: head or group; default head")
flags.DEFINE_list("orders", None, "of prune: which orders; of remove: which one of FILE")
flags.DEFINE_list("penalties", None, "of gates: nats a head, several")
flags.DEFINE_integer("gate_steps", None, "of gates: training steps of the gates", lower_bound=1)
flags.DEFINE_bool("train_params", None, "of gates: train the model along with them")
flags.DEFINE_bool("scratch", None, "of gates: also train the same heads from scratch (default yes)")
flags.DEFINE_string("from", None, "of remove: JSON of a prune result")
flags.DEFINE_string("keep", None, "of remove: share or number of heads that stay, 60% or 5")
flags.DEFINE_integer("seed", None, "of random sets, permutations, bootstrap; default 0", lower_bound=0)


def options(task: str) -> dict:
    """The flags given, under the names of the Python functions. ConfigError for one that is not of the task."""
    given = {}
    for name in sorted(set(sum(OPTIONS.values(), ()))):
        value = flags.FLAGS[name].value
        if value is None:
            continue
        if name not in OPTIONS[task]:
            owners = [t.replace("gates", "prune --method=gates") for t, names in OPTIONS.items() if name in names]
            shown = ",".join(value) if isinstance(value, list) else value
            raise ConfigError(f"--{name}={shown}: not of this task; it belongs to {', '.join(owners)}")
        if value == []:
            raise ConfigError(f"--{name}= is empty: allowed are values with commas between them")
        given[NAMES.get(name, name)] = tuple(value) if isinstance(value, list) else value
    if "penalties" in given:
        try:
            given["penalties"] = tuple(float(x) for x in given["penalties"])
        except ValueError:
            raise ConfigError(f"--penalties={','.join(given['penalties'])}: allowed are numbers") from None
    return given


def main(_):
    if not WORKDIR.value:
        raise ConfigError("--workdir=runs/NAME is needed")
    if TASK.value not in TASKS:
        near = difflib.get_close_matches(str(TASK.value), TASKS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"--task={TASK.value}: allowed are {', '.join(TASKS)}{hint}")
    if METHOD.value != "orders" and TASK.value != "prune":
        raise ConfigError(f"--method={METHOD.value}: not of this task; it belongs to prune")
    task = "gates" if METHOD.value == "gates" else TASK.value
    given = options(task)
    from mha_jax.report import evaluation
    from mha_jax.training import checkpoint, folder, loop, sharding

    sharding.use_cpu_devices(folder.read_config(folder.absolute(WORKDIR.value)))
    try:
        evaluation.evaluate(WORKDIR.value, task, STEP.value, OUT.value, **given)
    except loop.NonFinite as error:
        command.fail(error, command.EXIT_NON_FINITE)
    except checkpoint.CheckpointError as error:
        command.fail(error, command.EXIT_SAVE_FAILED)


if __name__ == "__main__":
    command.run(main)
