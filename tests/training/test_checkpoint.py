"""A checkpoint is whole or it is not there: saved, kept, found, and checked against what was saved."""
import json
import os
import pathlib
import resource
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mha_jax.config import CheckpointConfig, ConfigError
from mha_jax.training import checkpoint
from mha_jax.training.checkpoint import CheckpointError, Checkpoints, content_hash

# Orbax leaves coroutines behind when a restore fails.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


COUNTED = {"tokens": 0, "seconds": 1.0, "probe_seconds": 0.0, "compile_seconds": 0.0, "data": "abc", "config": {}}


def state(step: int) -> dict:
    """Arrays that differ from step to step, with the shapes that a run has."""
    return {
        "params": {"embed_VD": jnp.arange(12.0).reshape(4, 3) + step, "scale_D": jnp.ones(3)},
        "optimizer": {"mu": jnp.full((4, 3), 0.5 * step), "count": jnp.int32(step)},
    }


def abstract(*names):
    return {n: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(0)[n])
            for n in names or ("params", "optimizer")}  # fmt: skip


def saved(workdir, steps_and_losses, last=100, **cfg) -> Checkpoints:
    out = Checkpoints(workdir, CheckpointConfig(**cfg), last)
    for step, loss in steps_and_losses:
        out.save(step, state(step), COUNTED | {"tokens": 10 * step}, loss)
    return Checkpoints(workdir, CheckpointConfig(**cfg), last)  # opened anew, as a restarted run does


def assert_state(found: dict, step: int):
    for name, tree in found.items():
        jax.tree.map(np.testing.assert_array_equal, tree, state(step)[name])


def test_what_is_saved_comes_back_with_its_meta(tmp_path):
    found, meta = saved(tmp_path, [(0, 3.0), (7, 2.0)]).restore(7, abstract())
    assert_state(found, 7)
    assert (meta["step"], meta["tokens"], meta["eval_loss"], meta["definitions"]) == (7, 70, 2.0, "1")
    params, _ = Checkpoints(tmp_path, CheckpointConfig()).restore(7, abstract("params"))
    assert params.keys() == {"params"}
    assert_state(params, 7)


def test_another_shape_or_another_tree_is_refused(tmp_path):
    checkpoints = saved(tmp_path, [(0, 1.0)])
    other = abstract("params")
    other["params"]["scale_D"] = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=other["params"]["scale_D"].sharding)
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/checkpoints/0 cannot be read"):
        checkpoints.restore(0, other)
    more = abstract("params")
    more["params"]["bias_D"] = more["params"]["scale_D"]
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/checkpoints/0 cannot be read"):
        checkpoints.restore(0, more)


# ---------------------------------------------------------------------------------------------------- content hash


def test_the_hash_is_that_of_the_bits_their_place_and_their_name():
    tree = {"a": jnp.array([[1.0, 2.0], [3.0, 4.0]]), "b": jnp.zeros(3)}
    same = content_hash(tree)
    assert len(same) == 16 and same == content_hash(jax.tree.map(jnp.array, tree))
    others = [
        tree | {"a": tree["a"][::-1]},  # moved rows
        tree | {"a": tree["a"].T},
        tree | {"a": tree["a"].at[1, 1].set(np.nextafter(np.float32(4), np.float32(5)))},  # one bit
        tree | {"b": jnp.array([0.0, -0.0, 0.0])},  # the sign of a zero
        {"a": tree["b"], "b": tree["a"]},
        {"a": tree["a"], "c": tree["b"]},
        {"a": tree["a"]},
    ]
    assert len({same, *map(content_hash, others)}) == len(others) + 1


def test_the_hash_does_not_depend_on_the_mesh():
    tree = {"w_DF": jnp.sin(jnp.arange(64.0)).reshape(8, 8), "count": jnp.int32(3)}
    expected = content_hash(tree)
    for shape in ((8, 1), (2, 4), (1, 8)):
        mesh = Mesh(np.array(jax.devices()).reshape(shape), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
        put = {"w_DF": jax.device_put(tree["w_DF"], NamedSharding(mesh, P("y", "x"))),
               "count": jax.device_put(tree["count"], NamedSharding(mesh, P()))}  # fmt: skip
        assert content_hash(put) == expected


def flip_a_bit(folder: pathlib.Path):
    """Changes one value of a checkpoint where its checksum, if any, still holds: as if it had been saved so."""
    (name,) = {p.parents[1] for p in folder.rglob("params/_METADATA")}
    step = int(name.name)
    wrong = state(step)
    wrong["params"]["embed_VD"] = wrong["params"]["embed_VD"].at[2, 1].multiply(1 + 2**-23)
    meta = (name / "meta" / "metadata").read_text()
    other = folder.parent / "other"
    Checkpoints(other, CheckpointConfig()).save(step, wrong, COUNTED, 1.0)
    (name / "params").rename(folder.parent / "removed")
    (other / "checkpoints" / str(step) / "params").rename(name / "params")
    (name / "meta" / "metadata").write_text(meta)


def test_fc_16_a_value_that_changed_on_disk_is_not_restored(tmp_path):
    checkpoints = saved(tmp_path / "run", [(3, 1.0)])
    flip_a_bit(tmp_path / "run" / "checkpoints")
    for names in (("params",), ("params", "optimizer")):
        with pytest.raises(CheckpointError, match="checkpoints/3 is not what was saved"):
            checkpoints.restore(3, abstract(*names))


def test_fc_16_whatever_byte_changes_on_disk_another_state_is_never_restored(tmp_path):
    checkpoints = saved(tmp_path, [(3, 1.0)])
    refused = 0
    for path in sorted(p for p in (tmp_path / "checkpoints" / "3").rglob("*") if p.is_file() and p.stat().st_size):
        content = path.read_bytes()
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1:])
        try:
            assert_state(checkpoints.restore(3, abstract())[0], 3)
        except CheckpointError:
            refused += 1
        path.write_bytes(content)
    assert refused >= 4  # of either item its data and its manifest, at least
    assert_state(checkpoints.restore(3, abstract())[0], 3)


# --------------------------------------------------------------------------------------------- damaged checkpoints


def test_fc_16_the_newest_whole_one_is_found_and_the_others_make_way(tmp_path):
    saved(tmp_path, [(10, 1.0), (30, 1.0)])
    folder = tmp_path / "checkpoints"
    (folder / "20").mkdir()
    (folder / "30" / "params" / "manifest.ocdbt").unlink()
    (folder / "40.orbax-checkpoint-tmp").mkdir()
    warnings = []
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), 100)
    step, found, meta = checkpoints.restore_newest(abstract(), warnings.append)
    assert step == 10 and meta["step"] == 10
    assert_state(found, 10)
    assert [w.split(" skipped")[0] for w in warnings] == ["checkpoint 30", "checkpoint 20"]
    assert all(str(tmp_path / "damaged") in w for w in warnings)
    for later in (20, 30, 40):
        checkpoints.save(later, state(later), COUNTED, 1.0)
    assert Checkpoints(tmp_path, CheckpointConfig()).steps() == [10, 20, 30, 40]
    assert sorted(p.name for p in (tmp_path / "damaged").iterdir()) == ["20", "30"]


def test_fc_16_whatever_file_is_missing_the_run_goes_on_from_a_whole_state(tmp_path):
    saved(tmp_path / "first", [(10, 1.0), (30, 2.0)], keep="never")
    files = [p.relative_to(tmp_path / "first") for p in (tmp_path / "first" / "checkpoints" / "30").rglob("*")
             if p.is_file()]  # fmt: skip
    begun = set()
    for i, path in enumerate(files):
        copy = tmp_path / str(i)
        shutil.copytree(tmp_path / "first", copy)
        (copy / path).unlink()
        checkpoints = Checkpoints(copy, CheckpointConfig(keep="never"), 100)
        warnings = []
        step, found, _ = checkpoints.restore_newest(abstract(), warnings.append)
        assert_state(found, step)  # what Orbax can do without is no damage: the content is what was saved
        assert len(warnings) == (0 if step == 30 else 1)
        checkpoints.save(40, state(40), COUNTED, 3.0)
        checkpoints.save(50, state(50), COUNTED, 4.0)
        assert checkpoints.steps()[-2:] == [40, 50]
        begun.add(step)
    assert begun == {10, 30}


def test_a_second_damaged_checkpoint_of_a_step_does_not_replace_the_first(tmp_path):
    saved(tmp_path, [(10, 1.0)])
    for _ in range(2):
        (tmp_path / "checkpoints" / "20").mkdir()
        Checkpoints(tmp_path, CheckpointConfig()).restore_newest(abstract(), lambda _: None)
    assert sorted(p.name for p in (tmp_path / "damaged").iterdir()) == ["20", "20_"]


@pytest.mark.parametrize("text", ["null", "[]", "7", '"text"', "", '{"step": 20', "{}", '{"step": 20, "hash": "x"}'])
def test_a_checkpoint_with_damaged_metadata_is_a_damaged_checkpoint(tmp_path, text):
    saved(tmp_path, [(10, 1.0), (20, 2.0)])
    (tmp_path / "checkpoints" / "20" / "meta" / "metadata").write_text(text)
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    for read in (lambda: checkpoints.restore(20, abstract()), lambda: checkpoints.find("best")):
        with pytest.raises(CheckpointError, match=rf"{tmp_path}/checkpoints/20 cannot be read: ") as caught:
            read()
        assert "\n" not in str(caught.value)
    warnings = []
    assert checkpoints.restore_newest(abstract(), warnings.append)[0] == 10
    assert len(warnings) == 1 and warnings[0].startswith("checkpoint 20 skipped and moved to ")


def test_nothing_is_begun_again_because_no_checkpoint_can_be_read(tmp_path):
    saved(tmp_path, [(10, 1.0), (20, 1.0)])
    for step in (10, 20):
        (tmp_path / "checkpoints" / str(step) / "params" / "manifest.ocdbt").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint can be read, the newest because .*/checkpoints/20 "):
        Checkpoints(tmp_path, CheckpointConfig()).restore_newest(abstract(), lambda _: None)
    assert Checkpoints(tmp_path, CheckpointConfig()).steps() == [10, 20]


def test_a_folder_that_was_never_finished_is_no_obstacle(tmp_path):
    (tmp_path / "checkpoints" / "0").mkdir(parents=True)
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    assert checkpoints.restore_newest(abstract(), lambda _: None) is None
    checkpoints.save(0, state(0), COUNTED, None)
    assert checkpoints.steps() == [0]


# ---------------------------------------------------------------------------------------------------------- saving


def test_fc_15_a_save_that_nothing_came_of_is_an_error(tmp_path):
    checkpoints = saved(tmp_path, [(5, 1.0)])
    for step in (5, 3):  # Orbax returns False for these, and no more
        with pytest.raises(CheckpointError, match=rf"saving step {step} to {tmp_path}/checkpoints failed"):
            checkpoints.save(step, state(step), COUNTED, 1.0)
    assert_state(checkpoints.restore(5, abstract())[0], 5)


def test_fc_15_a_save_that_raises_names_path_and_step(tmp_path, monkeypatch):
    checkpoints = saved(tmp_path, [(5, 1.0)])

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.ocp.CheckpointManager, "save", full)
    with pytest.raises(CheckpointError, match=rf"step 6 to {tmp_path}/checkpoints failed: OSError: .*No space left"):
        checkpoints.save(6, state(6), COUNTED, 1.0)
    assert_state(checkpoints.restore(5, abstract())[0], 5)


def test_fc_15_a_disk_that_is_full_is_named_as_the_reason(tmp_path):
    checkpoints = saved(tmp_path, [(5, 1.0)])
    wide = {"w_DF": jax.random.normal(jax.random.key(0), (64, 1024))}  # 256 KiB that compress little
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))  # writes fail as on a full disk
    try:
        with pytest.raises(CheckpointError, match=rf"step 6 to {tmp_path}/checkpoints failed: ") as caught:
            checkpoints.save(6, {"params": wide, "optimizer": wide}, COUNTED, 1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "File too large" in str(caught.value) and "\n" not in str(caught.value)
    assert_state(checkpoints.restore(5, abstract())[0], 5)


def test_fc_16_the_older_one_is_there_until_the_newer_is_whole(tmp_path, monkeypatch):
    checkpoints = saved(tmp_path, [(1, 1.0)], keep="never", keep_latest=1, keep_best=0)
    at_rename = []
    for name in ("rename", "replace"):
        real = getattr(os, name)

        def watch(source, target, *args, real=real, **kwargs):
            if str(target).endswith("checkpoints/2"):
                at_rename.append((tmp_path / "checkpoints" / "1" / "meta" / "metadata").exists())
            return real(source, target, *args, **kwargs)

        monkeypatch.setattr(os, name, watch)
    checkpoints.save(2, state(2), COUNTED, 1.0)
    assert at_rename == [True]
    assert checkpoints.steps() == [2]


# --------------------------------------------------------------------------------------------------------- keeping


@pytest.mark.parametrize(("keep", "latest", "best", "expected"), [
    ("never", 1, 1, [1, 5]),
    ("never", 2, 1, [1, 4, 5]),
    ("never", 1, 0, [5]),
    ("never", 1, 2, [1, 2, 5]),
    ("at:3", 1, 1, [1, 3, 5]),
    ("2", 1, 0, [2, 4, 5]),
    ("all", 1, 0, [1, 2, 3, 4, 5]),
])  # fmt: skip
def test_fc_17_best_and_newest_are_kept_and_nan_is_never_best(tmp_path, keep, latest, best, expected):
    losses = [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, float("nan"))]
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=keep, keep_latest=latest, keep_best=best), 100)
    for step, loss in losses[:3]:
        checkpoints.save(step, state(step), COUNTED, loss)
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=keep, keep_latest=latest, keep_best=best), 100)
    for step, loss in losses[3:]:  # a restarted run knows the losses of what it finds
        checkpoints.save(step, state(step), COUNTED, loss)
    assert checkpoints.steps() == expected
    assert checkpoints.find("last") == 5
    assert checkpoints.restore_newest(abstract(), pytest.fail)[0] == 5
    if best:
        assert checkpoints.find("best") == 1
    assert checkpoints.meta(5)["eval_loss"] is None
    assert json.loads((tmp_path / "checkpoints" / "5" / "meta" / "metadata").read_text())["step"] == 5


def test_a_better_one_later_takes_over(tmp_path):
    checkpoints = saved(tmp_path, [(1, 1.0), (2, float("nan")), (3, None), (4, 0.5), (5, float("inf")), (6, 0.7)],
                        keep="never", keep_latest=1, keep_best=1)  # fmt: skip
    assert checkpoints.steps() == [4, 6]
    assert checkpoints.find("best") == 4


def test_find_says_what_there_is(tmp_path):
    with pytest.raises(ConfigError, match=rf"{tmp_path}/checkpoints: there is no checkpoint"):
        Checkpoints(tmp_path, CheckpointConfig()).find("last")
    checkpoints = saved(tmp_path, [(2, None), (10, float("nan"))])
    assert (checkpoints.find("last"), checkpoints.find("2"), checkpoints.find("10")) == (10, 2, 10)
    for wrong in ("3", "-1", "first", "2.0", ""):
        with pytest.raises(ConfigError, match=rf"--step={wrong}: allowed are last, best, all and .* steps 2, 10"):
            checkpoints.find(wrong)
    with pytest.raises(ConfigError, match=r"--step=best: no checkpoint in .* has an evaluation loss"):
        checkpoints.find("best")
