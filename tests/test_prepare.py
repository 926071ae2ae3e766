"""The scripts that prepare text: what they print, and what they refuse in one line."""
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.data.text_set import TRAIN, VALIDATION, prepared
from tests.test_train_command import environment

ROOT = pathlib.Path(__file__).parents[1]


def run(script, *args, cwd):
    env = environment(cwd) | {"PYTHONWARNINGS": "ignore"}
    return subprocess.run([sys.executable, str(ROOT / "scripts" / script), *args], cwd=cwd, env=env, timeout=120,
                          capture_output=True, text=True)  # fmt: skip


def test_prepare_data_makes_what_training_finds(tmp_path):
    """From any folder; the second time it is there, and the hashes are the same."""
    (tmp_path / "books").mkdir()
    for i in range(60):
        (tmp_path / "books" / f"{i}.txt").write_text(f"book {i} " * (200 + i))
    args = (f"--config={ROOT}/configs/stdlib.py", "--config.data.dataset=files:books/*.txt",
            f"--config.data.cache_dir={tmp_path}/cache", "--config.data.tokenizer=bytes",
            "--config.data.validation=10%")  # fmt: skip
    first, again = (run("prepare_data.py", *args, cwd=tmp_path) for _ in range(2))
    assert first.returncode == 0, first.stderr
    lines = first.stdout.splitlines()
    assert "in 54 document(s)" in lines[0] and "in 6 document(s) (10% of the different texts, by their" in lines[0]
    assert lines[1].startswith("train: ") and "in 1 shard(s), sha256 " in lines[1]
    assert again.stdout.splitlines()[:3] == lines[:3]
    assert len([p for p in (tmp_path / "cache" / "tokens").iterdir() if p.name[0] != "."]) == 2


@pytest.mark.parametrize(("args", "message"), [
    (["--config=configs/quickstart.py"], "config.data.task = 'repeat': made on the fly, there is nothing to prepare"),
    (["--config=configs/stdlib.py", "--config.data.dataset=files:nowhere/*"], "no file matches "),
])  # fmt: skip
def test_what_cannot_be_prepared_is_one_line(tmp_path, args, message):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    done = run("prepare_data.py", *args, f"--config.data.cache_dir={tmp_path}/cache", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert message in done.stderr


@pytest.fixture
def prepare_tfds(monkeypatch):
    """The script's module and a function that runs it."""
    spec = importlib.util.spec_from_file_location("prepare_tfds", ROOT / "scripts" / "prepare_tfds.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def call(*args):
        monkeypatch.setattr(sys, "argv", ["prepare_tfds.py", *map(str, args)])
        module.main()

    return module, call


def test_prepare_tfds_asks_for_a_format_with_random_access(prepare_tfds, tmp_path, monkeypatch, capsys):
    module, call = prepare_tfds
    asked = []

    class Builder:
        data_dir = tmp_path / "there"

        def download_and_prepare(self):
            asked.append("prepared")

    monkeypatch.setattr(module.tfds, "builder", lambda name, **given: (asked.append((name, given)), Builder())[1])
    call("wiki40b/en:1.3.0", f"--data_dir={tmp_path}")
    assert asked == [("wiki40b/en:1.3.0", {"data_dir": tmp_path, "file_format": "array_record"}), "prepared"]
    assert capsys.readouterr().out == f"prepared: --config.data.dataset={tmp_path}/there\n"


def test_prepare_tfds_leaves_what_can_be_read_and_says_what_it_needs(prepare_tfds, tmp_path, capsys):
    _, call = prepare_tfds
    folder = pathlib.Path(prepared(tmp_path, TRAIN, VALIDATION))
    call(folder)
    assert capsys.readouterr().out == f"prepared: --config.data.dataset={folder}\n"
    info = json.loads((folder / "dataset_info.json").read_text())
    (folder / "dataset_info.json").write_text(json.dumps(info | {"fileFormat": "tfrecord"}))
    for args in ((folder, f"--data_dir={tmp_path}/new"), ("lm1bb",)):
        with pytest.raises(SystemExit) as stopped:
            call(*args)
        assert "pip install -r requirements-prepare.txt, in an environment of its own" in str(stopped.value)
    (tmp_path / "new" / "text_set" / "1.0.0").mkdir(parents=True)
    with pytest.raises(SystemExit, match="exists; choose another --data_dir"):
        call(folder, f"--data_dir={tmp_path}/new")


def test_the_scripts_of_an_environment_of_its_own_need_nothing_of_ours():
    text = (ROOT / "scripts" / "prepare_tfds.py").read_text()
    assert "from mha_jax" not in text and "import mha_jax" not in text and "import jax" not in text
    assert os.path.exists(ROOT / "requirements-prepare.txt")
