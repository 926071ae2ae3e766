"""Train a model and watch its heads.

    python train.py --config=configs/quickstart.py --workdir=runs/quickstart [--config.section.key=value ...]

Running it again in the same folder continues where the last checkpoint stands.
Exit codes: 0 done; 2 bad config or input; 3 a loss was not finite; 4 a save failed; 143 after SIGTERM, saved.
"""
from absl import flags

from mha_jax import command
from mha_jax.config import ConfigError
from mha_jax.validation import resolve

CONFIG = command.define_config()
WORKDIR = flags.DEFINE_string("workdir", None, "run folder; made if absent, continued if it holds a run")
RESTORE = flags.DEFINE_enum("restore", "state", ["state", "params"],
                            "state continues exactly; params keeps the parameters under a fresh optimizer")  # fmt: skip


def main(_):
    if WORKDIR.value is None or CONFIG.value is None:
        raise ConfigError("--config=configs/NAME.py and --workdir=runs/NAME are both needed")
    config = resolve(CONFIG.value)
    import jax

    from mha_jax.training import checkpoint, hosts, loop, sharding, summary

    hosts.join()
    sharding.use_cpu_devices(config)
    from mha_jax.report import plots

    try:
        result = loop.train(config, WORKDIR.value, restore=RESTORE.value, draw=plots.draw_all)
    except loop.NonFinite as error:
        command.fail(error, command.EXIT_NON_FINITE)
    except checkpoint.CheckpointError as error:
        command.fail(error, command.EXIT_SAVE_FAILED)
    if jax.process_index() > 0:
        return
    print("\n".join(summary.describe(result)))
    print(f"run folder: {WORKDIR.value}  (plots/emergence.png, plots/heads.png, summary.json)")


if __name__ == "__main__":
    command.run(main)
