"""Two real processes: they see one process's batches between them, train as one would, and write one run folder."""
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from mha_jax.config import ConfigError
from mha_jax.data.source import make_source
from mha_jax.training import hosts, sharding
from tests.training import tiny

ROOT = pathlib.Path(__file__).parents[1]
STEPS = 6
# What a process does: says which rows it holds of two calls, then trains.
PROCESS = """
import json, sys
import jax, numpy as np
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_num_cpu_devices", 1)
from mha_jax.training import hosts, sharding
hosts.join()
from mha_jax.data.source import make_source
from tests import test_hosts
from tests.training import tiny
config = test_hosts.text_run(*sys.argv[1:3])
source = make_source(config, sharding.make_mesh(config))
for step in (0, 4):
    for key, array in source.batches(step, config.steps_per_call).items():
        for shard in array.addressable_shards:
            print(json.dumps([step, key, shard.index[1].start or 0, np.asarray(shard.data).tolist()]))
summary, _ = tiny.train(config, sys.argv[3])
print(json.dumps(["loss", summary["final_eval_loss"], jax.process_count()]))
"""


def text_run(corpus, cache_dir, steps=STEPS):
    return tiny.config(**{
        "steps": steps, "data.task": "text", "data.dataset": f"files:{corpus}/*", "data.packing": "packed",
        "data.cache_dir": cache_dir, "data.tokenizer": "bytes", "probes.panel": "3", "checkpoint.save": "3",
        "data.validation": "10%", "tracking.log_every": 1, "tracking.wandb": "disabled",
        "optimizer.schedule": "constant", "model.num_layers": 1, "probes.repeats": 4, "probes.rows": 4,
    })  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(120):
        (folder / f"{i:03d}.txt").write_text(f"document {i} " + " ".join(f"word{j % (i + 2)}" for j in range(20 + i)))
    return str(folder)


@pytest.fixture(scope="module")
def two(corpus, tmp_path_factory):
    """(run folder, [what each process printed])"""
    tmp = tmp_path_factory.mktemp("two")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
                        "JAX_NUM_PROCESSES": "2", "JAX_PLATFORMS": "cpu"}  # fmt: skip
    command = [sys.executable, "-c", PROCESS, corpus, str(tmp / "cache"), str(tmp / "run")]
    children = [subprocess.Popen(command, env=env | {"JAX_PROCESS_ID": str(i)}, stdout=subprocess.PIPE, text=True,
                                 stderr=subprocess.PIPE) for i in range(2)]  # fmt: skip
    try:
        printed = [child.communicate(timeout=240) for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0, 0], printed
    return tmp / "run", [[json.loads(x) for x in out.splitlines() if x[:2] in ('[0', '[4', '["')] for out, _ in printed]


def one_process(config, devices=2):
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(devices, 1, 1), ("data", "fsdp", "tensor"),
                axis_types=(AxisType.Auto,) * 3)  # fmt: skip
    return mesh, make_source(config, mesh)


def test_fc_21_two_processes_hold_together_the_batches_of_one(two, corpus, tmp_path):
    _, source = one_process(text_run(corpus, str(tmp_path)), devices=1)
    for step in (0, 4):
        for key, whole in source.batches(step, 4).items():
            held = [(first, rows) for lines in two[1] for s, k, first, rows in (x for x in lines if x[0] != "loss")
                    if (s, k) == (step, key)]  # fmt: skip
            assert [first for first, _ in held] == [0, tiny.BATCH // 2], "each its half, in the order of the processes"
            np.testing.assert_array_equal(np.concatenate([rows for _, rows in held], axis=1), whole)


@pytest.fixture(scope="module")
def one(quick_module, corpus, tmp_path_factory):
    """(config, folder, mesh) of one process on two devices, three steps longer."""
    tmp = tmp_path_factory.mktemp("one")
    cfg = text_run(corpus, str(tmp / "cache"), steps=STEPS + 3)
    mesh, _ = one_process(cfg)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "make_mesh", lambda _: mesh)
        tiny.train(cfg, tmp / "run")
    return cfg, tmp / "run", mesh


def losses(workdir) -> dict:
    return {(e["step"], key): e[key] for e in tiny.events(workdir) for key in ("train/loss", "eval/loss") if key in e}


def test_fc_21_they_train_as_one_process_and_write_one_folder(two, one):
    workdir, printed = two
    said = [line for lines in printed for line in lines if line[0] == "loss"]
    assert said[0] == said[1] and said[0][2] == 2
    ours, theirs = losses(one[1]), losses(workdir)
    assert len(theirs) == STEPS + 3  # three evaluations
    written = [(e["step"], *e) for e in tiny.events(workdir)]
    assert len(written) == len(set(written)), "each line once, by one process"
    assert theirs == pytest.approx({key: ours[key] for key in theirs}, abs=1e-5)
    assert json.loads((workdir / "environment.json").read_text())["process_count"] == 2


def test_fc_21_a_run_of_two_processes_goes_on_with_one(two, one, tmp_path, monkeypatch):
    """Three more steps, no row again and none left out: the losses are those of a run that was never moved."""
    cfg, unmoved, mesh = one
    moved = shutil.copytree(two[0], tmp_path / "moved")
    monkeypatch.setattr(sharding, "make_mesh", lambda _: mesh)
    tiny.train(cfg, moved)
    assert losses(moved) == pytest.approx(losses(unmoved), abs=1e-5)


@pytest.fixture
def alone(monkeypatch):
    """Nothing in the environment speaks of other processes."""
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_ID", *hosts.COUNTS):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("given", [{"JAX_NUM_PROCESSES": "2"}, {"JAX_PROCESS_ID": "0"},
                                   {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"},
                                   {"JAX_NUM_PROCESSES": "two", "JAX_PROCESS_ID": "0"}])  # fmt: skip
def test_processes_that_do_not_fit_together_are_refused(alone, given, monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "localhost:1")
    for key, value in given.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(ConfigError, match="JAX_COORDINATOR_ADDRESS is set with JAX_NUM_PROCESSES = "):
        hosts.join()


@pytest.mark.parametrize(("name", "value", "several"), [
    ("SLURM_STEP_NUM_TASKS", "1", False), ("SLURM_STEP_NUM_TASKS", "2", True), ("OMPI_COMM_WORLD_SIZE", "1", False),
    ("OMPI_COMM_WORLD_SIZE", "8", True), ("HOME", "here", False),
])  # fmt: skip
def test_a_cluster_is_joined_where_there_are_several_processes(alone, name, value, several, monkeypatch):
    joined = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **given: joined.append(given))
    monkeypatch.setenv(name, value)
    hosts.join()
    assert joined == [{}] * several


def test_a_tpu_machine_asks_for_its_slice_and_goes_on_alone_without_one(alone, monkeypatch, tmp_path):
    asked = []

    def initialize():
        asked.append(1)
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr(hosts, "TPU_DEVICES", (str(tmp_path),))
    hosts.join()
    assert asked == [1]


def test_others_that_are_not_found_are_one_line(alone, monkeypatch):
    """Open MPI 5, which JAX does not know: nothing is trained by each alone."""
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="2 processes are to run together, and do not find each other .*by hand: JAX"):
        hosts.join()


@pytest.mark.parametrize(("cores", "processes", "devices"), [(2, 1, 2), (3, 2, 2), (4, 2, 4), (2, 4, 2), (3, 1, 2)])
def test_cpu_devices_of_all_processes_divide_the_rows(cores, processes, devices):
    cfg = tiny.config()
    assert sharding.cpu_devices(cfg, cores, processes) == devices
    assert tiny.BATCH % (devices * processes) == 0


def test_hosts_with_other_data_stop_before_they_train(monkeypatch):
    """As processes 0, 1 and 2 of three: what they gather, and that each is told."""
    texts, gathered = ["data a", "data b", "data a"], []
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(hosts.multihost_utils, "process_allgather", lambda x: (gathered.append(x), x)[1])
    for text in texts:
        hosts.check_hosts_agree(text)  # alike as far as this stand-in goes
    monkeypatch.setattr(hosts.multihost_utils, "process_allgather", lambda _: np.stack(gathered))
    for text in texts:
        with pytest.raises(ConfigError, match=r"process\(es\) 1 have other data or another config than process 0"):
            hosts.check_hosts_agree(text)
