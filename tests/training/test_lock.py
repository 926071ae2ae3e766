"""One run, one folder: a second process is refused, and a run whose checkpoints are gone is not begun again."""
import shutil
import subprocess
import sys

import pytest

from mha_jax.config import ConfigError
from mha_jax.training import folder
from tests.training import tiny

pytestmark = pytest.mark.usefixtures("shared_programs", "one_device")


def test_a_second_process_cannot_write_to_a_folder(tmp_path):
    code = f"from mha_jax.training import folder; import pathlib; folder.lock(pathlib.Path({str(tmp_path)!r}))"
    held = folder.lock(tmp_path)
    taken = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert taken.returncode != 0 and "another run is writing to it" in taken.stderr
    held.close()
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_run_without_its_checkpoints_is_not_begun_again(tmp_path):
    tiny.train(tiny.config(), tmp_path)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(ConfigError, match="no checkpoint is left"):
        tiny.train(tiny.config(), tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before and (tmp_path / "summary.json").exists()


def test_files_of_a_run_folder_can_be_read_by_others(tmp_path):
    folder.write_json(tmp_path / "x.json", {"a": float("nan"), "b": [1.0, float("inf")]})
    assert (tmp_path / "x.json").read_text() == '{\n  "a": null,\n  "b": [\n    1.0,\n    null\n  ]\n}\n'
    assert (tmp_path / "x.json").stat().st_mode & 0o044 == 0o044
