"""train.py as a person starts, interrupts and mistypes it: exit codes, messages, and what is left in the folder."""
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[1]
KEY = "0123456789abcdef0123456789abcdef01234567"
STEPS = 400
CONFIG = f"""
from mha_jax.config import CheckpointConfig, Config, DataConfig, ModelConfig, ProbesConfig


def get_config():
    return Config(
        name="tiny", steps={STEPS}, steps_per_call=4,
        model=ModelConfig(num_layers=2, d_model=32, num_heads=4, num_kv_heads=2),
        data=DataConfig(length=32, batch_size=8, vocab_size=64, period_min=4, period_max=8, eval_rows=8),
        probes=ProbesConfig(panel="100", rows=8, repeats=8, periods=(4, 8)),
        checkpoint=CheckpointConfig(save="200"),
    )
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A home folder with a config in it, where nothing in the environment speaks of W&B, and compiled programs stay."""
    home = tmp_path_factory.mktemp("home")
    (home / "tiny.py").write_text(CONFIG)
    return home


def environment(home, **extra):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "XLA_", "JAX_"))}
    return env | {
        "HOME": str(home), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_COMPILATION_CACHE_DIR": str(home / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    } | extra  # fmt: skip


def start(home, workdir, *overrides, **extra) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "train.py"), f"--config={home}/tiny.py", f"--workdir={workdir}"]
    return subprocess.Popen([*command, *overrides], cwd=home, env=environment(home, **extra), text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip


def finish(process) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def wait_for(process, ready):
    """Until `ready()`; the process must still run then."""
    for _ in range(6000):
        if ready():
            break
        time.sleep(0.01)
    assert process.poll() is None, process.communicate()
    assert ready()


def events(workdir):
    path = workdir / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
    return [{k: v for k, v in e.items() if k != "seconds" and not k.startswith("perf/")} for e in lines]


def saved(workdir):
    return sorted(int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdigit())


def meta(workdir, step):
    return json.loads((workdir / "checkpoints" / str(step) / "meta" / "metadata").read_text())


@pytest.fixture(scope="module")
def whole(home):
    """The run that nothing interrupted, though W&B could not be reached."""
    begin = time.perf_counter()
    process = start(home, "whole/", "--config.tracking.timeout=3", "--config.tracking.wandb=online", WANDB_API_KEY=KEY,
                    WANDB_BASE_URL="http://127.0.0.1:9")  # fmt: skip
    code, out, err = finish(process)
    return home / "whole", code, out, err, time.perf_counter() - begin


def test_fc_22_a_run_that_cannot_reach_wandb_ends_well(whole):
    workdir, code, out, err, seconds = whole
    assert code == 0, err
    assert len([line for line in err.splitlines() if "W&B" in line]) == 1 and "W&B is off: " in err
    assert seconds < 100
    assert [e["step"] for e in events(workdir) if "train/loss" in e] == list(range(0, STEPS, 10))
    assert [e["step"] for e in events(workdir) if "eval/loss" in e] == [0, 100, 200, 300, 400]
    assert saved(workdir) == [0, 200, 400]
    summary = json.loads((workdir / "summary.json").read_text())
    assert f"{summary['final_eval_loss']:.4f} nats" in out and summary["steps"] == STEPS
    assert json.loads((workdir / "config.json").read_text())["tracking"]["timeout"] == 3.0
    # fc_32: the platform and its devices, in the first lines and in the folder
    assert "1 cpu device(s)" in err.splitlines()[0]
    assert json.loads((workdir / "environment.json").read_text())["platform"] == "cpu"


def test_fc_16_sigterm_saves_at_the_step_and_a_resumed_run_is_the_same_run(home, whole):
    workdir = home / "stopped"
    process = start(home, "~/stopped")
    wait_for(process, lambda: any(e["step"] > 20 for e in events(workdir)))
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 143, err
    at = saved(workdir)[-1]
    assert 20 < at < STEPS and "Traceback" not in err
    assert all(e["step"] <= at for e in events(workdir))
    (home / "link").symlink_to(workdir)
    code, _, err = finish(start(home, "./link/"))
    assert code == 0 and f"resumes exactly from step {at}" in err
    assert events(workdir) == events(whole[0])
    assert meta(workdir, STEPS)["hash"] == meta(whole[0], STEPS)["hash"]


def test_fc_16_kill_in_the_middle_of_a_save_goes_on_from_the_last_that_is_whole(home, whole):
    workdir = home / "killed"
    few = ["--config.checkpoint.save=20", "--config.checkpoint.keep=never", "--config.checkpoint.keep_latest=1",
           "--config.checkpoint.keep_best=0"]  # fmt: skip
    process = start(home, workdir, *few)
    folder = workdir / "checkpoints"
    wait_for(process, lambda: folder.is_dir() and any((folder / str(s)).is_dir() for s in range(40, STEPS, 20)))
    wait_for(process, lambda: any("tmp" in p.name for p in folder.iterdir()))
    process.kill()
    finish(process)
    at = saved(workdir)[-1]
    assert 40 <= at < STEPS
    code, _, err = finish(start(home, workdir, *few))
    assert code == 0, err
    assert f"resumes exactly from step {at}" in err and "skipped" not in err
    assert [p.name for p in folder.iterdir()] == [str(STEPS)]
    assert meta(workdir, STEPS)["hash"] == meta(whole[0], STEPS)["hash"]


def test_fc_15_a_save_that_fails_is_one_line_and_exit_code_4(home, whole):
    # Writes past 16 KiB fail as on a full disk: a checkpoint's do, those before it do not.
    train = [sys.executable, str(ROOT / "train.py"), f"--config={home}/tiny.py", f"--workdir={home}/full"]
    done = subprocess.run(["bash", "-c", 'ulimit -f 16; exec "$@"', "bash", *train], cwd=home, env=environment(home),
                          capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.returncode == 4, done.stderr
    *before, last = done.stderr.splitlines()
    assert last.startswith(f"error: saving step 0 to {home}/full/checkpoints failed: ") and "File too large" in last
    assert before[-1].startswith("step      0/") and len(before) < 10  # and no traceback of any thread


def test_fc_16_a_damaged_checkpoint_is_one_line(home, whole):
    workdir = home / "damaged"
    shutil.copytree(whole[0], workdir)
    (workdir / "checkpoints" / str(STEPS) / "params" / "manifest.ocdbt").unlink()
    code, _, err = finish(start(home, workdir))
    assert code == 0 and "Traceback" not in err and "Error\n" not in err, err
    assert len([line for line in err.splitlines() if line.startswith(f"warning: checkpoint {STEPS} skipped")]) == 1
    assert "resumes exactly from step 200" in err and len(err.splitlines()) < 15
    assert meta(workdir, STEPS)["hash"] == meta(whole[0], STEPS)["hash"]


def test_what_threads_say_again_is_not_printed_and_all_else_is(home):
    script = """
import logging, sys
from absl import logging as absl_logging
from mha_jax import command
command._say_errors_once()

class Dropped:
    def __init__(self, error):
        self.error = error
    def __del__(self):
        raise self.error

def orbax(say):  # a call from a file of Orbax's
    exec(compile("say('again', exc_info=ValueError('again'))", "/x/orbax/future.py", "exec"), {"say": say})

Dropped(RuntimeError("Event loop is closed"))
Dropped(RuntimeError("first news"))
logging.getLogger("asyncio").error("Task exception was never retrieved", exc_info=ValueError("again"))
logging.getLogger("asyncio").error("second news", exc_info=ValueError("cause"))
orbax(absl_logging.get_absl_logger().error)
absl_logging.error("third news")
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment(home), capture_output=True,
                          text=True, check=True)  # fmt: skip
    assert "again" not in done.stderr and "closed" not in done.stderr and "retrieved" not in done.stderr
    assert all(f"{which} news" in done.stderr for which in ("first", "second", "third")) and "cause" in done.stderr


def test_fc_16_sigterm_during_compilation_ends_at_once_without_a_checkpoint(home):
    # Many layers and no programs kept: a compilation of many seconds.
    process = start(home, "compiling", "--config.model.num_layers=16", JAX_ENABLE_COMPILATION_CACHE="false")
    said = []
    for line in process.stderr:
        said.append(line)
        if line == "compiling\n":
            break
    time.sleep(1)
    assert process.poll() is None
    begin = time.perf_counter()
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 143 and time.perf_counter() - begin < 5, "".join(said) + err
    assert not (home / "compiling" / "checkpoints").exists()
    assert events(home / "compiling") == []


# -------------------------------------------------------------------------------------------------- what is refused

DRIVER = """
import json, os, runpy, sys
sys.path.insert(0, {root!r})
import absl.app, ml_collections.config_flags, mha_jax.command  # once for all cases; {more}
for case in json.load(sys.stdin):
    sys.stdout.flush()
    read, write = os.pipe()
    if os.fork() == 0:
        os.dup2(write, 1), os.dup2(write, 2), os.close(read)
        sys.argv = ["train.py", *case]
        code = 0
        try:
            {patch}
            runpy.run_path({root!r} + "/train.py", run_name="__main__")
        except SystemExit as error:
            code = error.code
        except BaseException:
            import traceback
            traceback.print_exc()
            code = 99
        sys.stdout.flush(), sys.stderr.flush()
        os.write(1, ("\\0%s" % json.dumps([code, "jax" in sys.modules])).encode())
        os._exit(0)
    os.close(write)
    text, _, last = os.fdopen(read).read().rpartition("\\0")
    os.wait()
    print(json.dumps([text, *json.loads(last)]))
"""


def run_cases(home, cases, more="", patch="pass", **extra) -> list[tuple[str, int, bool]]:
    """(what was printed, exit code, whether JAX was imported) of train.py with each list of arguments.

    Imports are made once and each case is a fork: an import for each would take a second.
    """
    driver = DRIVER.format(root=str(ROOT), more=more, patch=patch)
    done = subprocess.run([sys.executable, "-c", driver], input=json.dumps(cases), capture_output=True, text=True,
                          cwd=home, env=environment(home, **extra), timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


FINE = ["--config=tiny.py", "--workdir=no"]
OVERRIDES = {
    "model.num_hedas=2": "config.model.num_hedas: no such key; did you mean config.model.num_heads?",
    "model.batch_size=2": "config.model.batch_size: no such key; did you mean config.data.batch_size?",
    "num_heads=2": "config.num_heads: no such key; did you mean config.model.num_heads?",
    "model=2": "config.model: no such key; did you mean config.model.",
    "model.head_dmi=None": "config.model.head_dmi: no such key; did you mean config.model.head_dim?",
    "model.num_heads=four": "config.model.num_heads=four",
    "model.num_heads=3.5": "config.model.num_heads=3.5",
    "model.num_heads=": "config.model.num_heads=",
    "model.num_heads=None": "config.model.num_heads = None: allowed is int",
    "model.tied=maybe": "config.model.tied=maybe",
    "data.task=repaet": "config.data.task = 'repaet': allowed are repeat, trigger, markov, text; did you mean 'rep",
    "model.d_model=30": "config.model.d_model = 30 does not divide by config.model.num_heads = 4",
    "model.num_kv_heads=3": "config.model.num_heads = 4 does not divide by config.model.num_kv_heads = 3: allowed are",
    "optimizer.accumulation=3": "config.data.batch_size = 8 does not divide by config.optimizer.accumulation = 3",
}
COMMANDS = {
    "--config=tiny.py": "--workdir=runs/NAME",
    "--workdir=no": "--config=configs/NAME.py",
    "--workdir=no --config.steps=3": "config.steps",
    "--workdir=no --config.model.head_dim=None": "--config=configs/NAME.py",
    "--config=tiny.py --workdir=no --wokdir=x": "Unknown command line flag 'wokdir'. Did you mean: workdir ?",
    "--config=tiny.py --workdir=no stray": "'stray': not a flag",
    "--config=tiny.py --workdir=no --restore=all": "--restore=all: value should be one of <state|params>",
    "--config=nowhere.py --workdir=no": "--config=nowhere.py: there is no such file\n",
    "--config tinny.py --workdir=no --config.steps=3": "--config=tinny.py: there is no such file; did you mean tiny.py",
    "--config=quikstart --workdir=no": f"no such file; did you mean {ROOT}/configs/quickstart.py?",
    "--config=/no/gqa.py:2 --workdir=no": f"--config=/no/gqa.py: there is no such file; did you mean {ROOT}/configs/gq",
    "--config= --workdir=no": "--config= is empty: allowed is a path",
    "--config=tiny.py --workdir=": "--workdir= is empty: allowed is a path",
    "--config=. --workdir=no": "--config: cannot be loaded",
}
FILES = {  # get_config's body: the message
    "return 1 / 0": "--config: cannot be loaded: ZeroDivisionError: division by zero",
    "return int('x')": "--config: cannot be loaded: ValueError: invalid literal",
    "return return": "--config: cannot be loaded: SyntaxError",
    "return {'model': 3}": "--config: get_config() returned a dict: allowed is a Config",
    "return Config(model=ModelConfig(num_hedas=3))": OVERRIDES["model.num_hedas=2"],
    "return Config(stpes=3)": "config.stpes: no such key; did you mean config.steps?",
    "c = Config(); c.model.num_hedas = 3; return c": OVERRIDES["model.num_hedas=2"],
    "c = Config(); c.model.batch_size = 3; return c": OVERRIDES["model.batch_size=2"],
    "c = Config(); c.model.num_heads = 'four'; return c": "config.model.num_heads = 'four': allowed is int",
    "c = Config(); c.steps = 3.5; return c": "config.steps = 3.5: allowed is int",
    "pass\ndel get_config": "has no attribute 'get_config'",
}
REFUSED = OVERRIDES | COMMANDS | FILES


@pytest.fixture(scope="module")
def refusals(home):
    cases = [[*FINE, f"--config.{override}"] for override in OVERRIDES] + [text.split() for text in COMMANDS]
    for i, body in enumerate(FILES):
        (home / f"config_{i}.py").write_text(f"from mha_jax.config import *\ndef get_config():\n    {body}\n")
        cases.append([f"--config=config_{i}.py", "--workdir=no"])
    begin = time.perf_counter()
    return dict(zip(REFUSED, run_cases(home, cases), strict=True)), time.perf_counter() - begin


@pytest.mark.parametrize("name", REFUSED)
def test_fc_31_a_bad_command_line_is_one_line_and_exit_code_2(refusals, home, name):
    text, code, jax_imported = refusals[0][name]
    assert code == 2, text
    assert text.startswith("error: ") and text.count("\n") == 1 and REFUSED[name] in text
    assert not jax_imported  # so nothing can have been compiled
    assert not (home / "no").exists()


def test_help_names_every_flag_of_the_command(home):
    ((text, _, _),) = run_cases(home, [["--help"]])
    assert all(f"  --{flag}: " in text for flag in ("config", "workdir", "restore"))


def test_fc_31_refusals_are_quick(refusals):
    assert refusals[1] < 30  # all of them together, on any machine


def test_fc_31_what_is_right_is_taken_as_its_type(home):
    right = ["--config.optimizer.learning_rate=1", "--config.model.tied=1", "--config.data.random_triggers=false",
             "--config.model.head_dim=8", "--config.mesh.data=None", "--config.probes.periods=(5, 8)",
             "--config.tracking.timeout=0.5"]  # fmt: skip
    show = ("import mha_jax.config as c, mha_jax.validation as v; v.resolve = lambda config: "
            "(print(json.dumps(c.to_dict(config))), sys.exit(0))")  # fmt: skip
    ((text, code, _),) = run_cases(home, [[*FINE, *right]], patch=show)
    assert code == 0
    config = json.loads(text)
    assert config["optimizer"]["learning_rate"] == 1.0 and isinstance(config["optimizer"]["learning_rate"], float)
    assert config["model"]["tied"] is True and config["data"]["random_triggers"] is False
    assert (config["model"]["head_dim"], config["mesh"]["data"], config["tracking"]["timeout"]) == (8, None, 0.5)
    assert config["probes"]["periods"] == [5, 8]


def test_exit_codes_of_a_run_that_does_not_end(home):
    raising = {
        "loop.NonFinite('step 17: loss nan', 17)": (3, "error: step 17: loss nan\n"),
        "checkpoint.CheckpointError('saving step 20 to /x failed')": (4, "error: saving step 20 to /x failed\n"),
        "loop.Stopped(143)": (143, ""),
        "loop.ConfigError('config.steps = 3')": (2, "error: config.steps = 3\n"),
    }
    patch = ("from mha_jax.training import checkpoint, loop\n"
             "            error = eval(sys.argv.pop())\n"
             "            def train(*_, **__): raise error\n"
             "            loop.train = train")  # fmt: skip
    found = run_cases(home, [[*FINE, error] for error in raising], more="\nimport mha_jax.training.loop", patch=patch)
    assert [(code, text) for text, code, _ in found] == list(raising.values())


def test_fc_06_meshes_and_platforms_that_do_not_fit_are_refused_before_compiling(home):
    on_8 = {
        "mesh.data=2 mesh.fsdp=2": "config.mesh.data = 2, config.mesh.fsdp = 2, config.mesh.tensor = 1: their product "
                                   "4 is not the number of devices, 8",
        "mesh.data=3": "their product 3 is not the number of devices, 8",
        "mesh.data=16": "their product 16 is not the number of devices, 8",
        "mesh.data=4 mesh.tensor=2 data.batch_size=6": "6 rows, which do not divide by config.mesh.data x "
                                                       "config.mesh.fsdp = 4",
        "mesh.tensor=8": "config.model.num_heads = 4 (layer 0) does not divide by config.mesh.tensor = 8",
        "mesh.platform=gpu": "config.mesh.platform = 'gpu': this machine's devices are 'cpu'; allowed are auto, cpu",
    }  # fmt: skip
    cases = [[*FINE, *(f"--config.{o}" for o in overrides.split())] for overrides in on_8]
    found = run_cases(home, cases, more="\nimport mha_jax.training.loop",
                      XLA_FLAGS="--xla_force_host_platform_device_count=8")  # fmt: skip
    for (text, code, _), expected in zip(found, on_8.values(), strict=True):
        assert code == 2 and text.count("\n") == 1 and expected in text, text
    assert not (home / "no").exists()
