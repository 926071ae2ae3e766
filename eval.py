"""Measure a trained run, from its folder alone and on whatever devices there are.

    python eval.py --workdir=runs/NAME --task=heads|icl [--step=last|best|all|N] [--out=DIR]

heads   the panel of every head, as a table, a picture and JSON in eval/heads/
icl     loss by position and the ICL score beside the in-context unigram's and Bayes's, in eval/icl/
Exit codes: 0 done; 2 bad input; 4 a checkpoint cannot be read.
"""
from absl import flags

from mha_jax import command
from mha_jax.config import ConfigError

TASKS = ("heads", "icl")
WORKDIR = flags.DEFINE_string("workdir", None, "run folder")
TASK = flags.DEFINE_string("task", None, f"one of {', '.join(TASKS)}")
STEP = flags.DEFINE_string("step", "last", "last, best (lowest evaluation loss), all, or a saved step")
OUT = flags.DEFINE_string("out", None, "folder for the results; default WORKDIR/eval/TASK")


def main(_):
    if WORKDIR.value is None:
        raise ConfigError("--workdir=runs/NAME is needed")
    if TASK.value not in TASKS:
        raise ConfigError(f"--task={TASK.value}: allowed are {', '.join(TASKS)}")
    from mha_jax.report import evaluation
    from mha_jax.training import checkpoint, folder, sharding

    sharding.use_cpu_devices(folder.read_config(folder.absolute(WORKDIR.value)))
    try:
        evaluation.evaluate(WORKDIR.value, TASK.value, STEP.value, OUT.value)
    except checkpoint.CheckpointError as error:
        command.fail(error, command.EXIT_SAVE_FAILED)


if __name__ == "__main__":
    command.run(main)
