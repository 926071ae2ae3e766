"""The door to data: row r of step s is item s B + r on every mesh, and evaluation rows are nobody's training rows."""
import functools
import threading

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from mha_jax.config import Config, ConfigError, DataConfig, ProbesConfig
from mha_jax.data import source as sources
from mha_jax.data import tasks
from mha_jax.data.source import EVAL_SEED, make_source
from mha_jax.layout import batch_sharding, put_local
from mha_jax.validation import resolve
from tests.data.text_set import prepared

B, T, SIZE = 24, 16, 3  # batch_size, length, steps_per_call
SOURCES = ("repeat", "trigger", "concatenated", "packed")
MESHES = ((1, 1, 1), (8, 1, 1), (2, 2, 2), (3, 2, 1))


@pytest.fixture(scope="module", autouse=True)
def compiled_once(quick_module):
    """Sources of one task and mesh share their compiled batches: the seed is an argument of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "_batch_maker", functools.cache(sources._batch_maker))
        yield


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """(dataset, cache folder) of text whose training documents all say 'train' and validation documents 'valid'."""
    tmp = tmp_path_factory.mktemp("source")
    texts = {w: [f"{w} {i:03d} {'ab' * (i % 9)}{w}".encode() for i in range(n)] for w, n in
             {"train": 300, "valid": 60}.items()}  # fmt: skip
    return prepared(tmp, texts["train"], texts["valid"]), str(tmp / "cache")


def make(name, corpus, sizes=(1, 1, 1), seed=0):
    """The source of a resolved config on a mesh of (data, fsdp, tensor)."""
    data = DataConfig(length=T, batch_size=B, eval_rows=B, vocab_size=40, period_min=3, period_max=9)
    if name in ("concatenated", "packed"):
        data.task, data.packing, data.tokenizer = "text", name, "bytes"
        data.dataset, data.cache_dir = corpus
    else:
        data.task = name
    config = resolve(Config(seed=seed, steps_per_call=SIZE, data=data, probes=ProbesConfig(rows=B, repeats=B)))
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return make_source(config, Mesh(devices, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3))


def rows_by_item(source, items):
    """The batch arrays of these items, each item made alone, on the host."""
    if source.config.data.task == "text":
        alone = [source.text.rows(np.array([item])) for item in items]
        found = {k: np.concatenate([row[k] for row in alone]) for k in alone[0]}
        if source.config.data.packing == "concatenated":
            found |= {"positions_BT": None, "segments_BT": None}
        return found
    one = jax.jit(lambda seed, item: source.task.row(jax.random.fold_in(
        jax.random.key(seed, impl="threefry2x32"), item)))  # fmt: skip
    tokens = np.stack([one(np.uint32(source.config.seed), np.uint32(item)) for item in items])
    return {"inputs_BT": tokens[:, :-1], "targets_BT": tokens[:, 1:], "weights_BT": np.ones((len(items), T)),
            "positions_BT": None, "segments_BT": None}  # fmt: skip


@pytest.mark.parametrize("name", SOURCES)
def test_fc_21_row_r_of_step_s_is_item_s_b_plus_r_on_any_mesh(name, corpus):
    """Each device of each mesh holds its slice of the global batch, whatever made it."""
    step = 7
    expected = rows_by_item(make(name, corpus), range(step * B, (step + SIZE) * B))
    assert len(np.unique(expected["inputs_BT"], axis=0)) > B  # not one row again and again
    for sizes in MESHES:
        batches = make(name, corpus, sizes).batches(step, SIZE)
        assert batches.keys() == expected.keys()
        share = B // (sizes[0] * sizes[1])
        for key, rows in expected.items():
            if rows is None:
                assert batches[key] is None
                continue
            assert batches[key].shape == (SIZE, B, T)
            mesh = batches[key].sharding.mesh.devices
            held = {shard.device: shard.data for shard in batches[key].addressable_shards}
            assert len(held) == mesh.size
            for (i, j, _), device in np.ndenumerate(mesh):
                first = (i * sizes[1] + j) * share  # the devices along `tensor` hold the same rows
                wanted = rows.reshape(SIZE, B, T)[:, first : first + share]
                np.testing.assert_array_equal(held[device], wanted, err_msg=f"{key} {sizes}")


def as_host(i, hosts, sizes, corpus, monkeypatch):
    """(the rows of the batch that host i of n holds, function of a step giving what it reads of it)."""
    devices = np.array(jax.devices()[: int(np.prod(sizes))])
    mesh = Mesh(devices.reshape(sizes), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    where = batch_sharding(mesh).devices_indices_map((B,))
    mine = [np.arange(B)[where[d]] for d in np.array_split(mesh.devices.flatten(), hosts)[i]]
    monkeypatch.setattr(sources, "local_rows", lambda mesh, rows: np.unique(np.concatenate(mine)))
    monkeypatch.setattr(sources, "put_local", lambda mesh, local, at, rows: local)
    source = make("packed", corpus, sizes)
    asked, read = [], source.text.rows
    monkeypatch.setattr(type(source.text), "rows", lambda self, items: (asked.extend(items.tolist()), read(items))[1])
    found = source._make(7, SIZE)
    monkeypatch.undo()
    at = np.unique(np.concatenate(mine))
    assert asked == [(7 + i) * B + int(r) for i in range(SIZE) for r in at], "no row is read for another host"
    return at, found


@pytest.mark.parametrize(("sizes", "hosts"), [((8, 1, 1), 4), ((8, 1, 1), 8), ((3, 2, 1), 3), ((2, 2, 2), 2),
                                              ((8, 1, 1), 1)])  # fmt: skip
def test_fc_21_hosts_read_disjoint_rows_that_are_the_batch(sizes, hosts, corpus, monkeypatch):
    """As host i of n: each reads only what its devices hold, and in the order of the hosts it is the batch of one
    process; so a run that stopped at four hosts goes on with two."""
    whole = {k: np.asarray(v) for k, v in make("packed", corpus).batches(7, SIZE).items()}
    found = [as_host(i, hosts, sizes, corpus, monkeypatch) for i in range(hosts)]
    np.testing.assert_array_equal(np.concatenate([at for at, _ in found]), np.arange(B))
    for key, wanted in whole.items():
        np.testing.assert_array_equal(np.concatenate([rows[key] for _, rows in found], axis=1), wanted)


def test_fc_21_hosts_that_share_the_tensor_axis_read_the_same_rows(corpus, monkeypatch):
    """A mesh of (1, 1, 8) on 4 hosts: every host needs every row."""
    for i in range(4):
        at, _ = as_host(i, 4, (1, 1, 8), corpus, monkeypatch)
        np.testing.assert_array_equal(at, np.arange(B))


def test_the_next_call_is_made_ahead_and_never_changes_what_is_seen(corpus):
    """Whether the guess was right (step + n), or a schedule cut the call before, or a resumed run began elsewhere."""
    source, made = make("packed", corpus), []
    make_one = source._make
    source._make = lambda *args: (made.append((*args, threading.current_thread().name)), make_one(*args))[1]
    for step, n in ((0, 3), (3, 3), (6, 1), (7, 2), (20, 3), (23, 3)):
        batches = source.batches(step, n)
        expected = rows_by_item(make("packed", corpus), range(step * B, (step + n) * B))
        for key, rows in expected.items():
            np.testing.assert_array_equal(np.asarray(batches[key][:n]).reshape(n * B, T), rows)
    source._next[2].result()
    here, there = ([x[:2] for x in made if x[2].startswith(name)] for name in ("MainThread", "rows"))
    assert here == [(0, 3), (7, 2), (20, 3)], "the first, one longer than guessed, one that comes from elsewhere"
    assert there == [(3, 3), (6, 3), (7, 1), (9, 2), (23, 3), (26, 3)], "one ahead of each call, in the background"


def test_fc_21_a_host_whose_rows_lie_apart_places_each_where_it_belongs(monkeypatch):
    """Devices of one host need not be neighbours on the mesh: rows 2, 3, 8 and 9 of 12."""
    at, placed = np.array([2, 3, 8, 9]), {}

    def of_devices(shape, sharding, callback):
        placed.update({first: callback((slice(None), slice(first, first + 2))) for first in (2, 8)})
        return shape

    monkeypatch.setattr(jax, "make_array_from_callback", of_devices)
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(2, 1, 1), ("data", "fsdp", "tensor"))
    assert put_local(mesh, np.stack([at, 100 + at])[..., None], at, 12) == (2, 12, 1)
    assert placed[2][..., 0].tolist() == [[2, 3], [102, 103]] and placed[8][..., 0].tolist() == [[8, 9], [108, 109]]


@pytest.mark.parametrize("name", SOURCES)
def test_a_call_of_n_steps_is_padded_and_its_first_n_are_single_steps(name, corpus):
    source, padded = make(name, corpus, (2, 2, 2)), make(name, corpus, (2, 2, 2)).batches(5, 2)
    for i in range(2):
        single = source.batches(5 + i, 1)
        for key, value in single.items():
            if value is None:
                assert padded[key] is None
                continue
            assert padded[key].shape == value.shape == (SIZE, B, T) and padded[key].dtype == value.dtype
            assert padded[key].sharding == value.sharding
            np.testing.assert_array_equal(padded[key][i], value[0])


@pytest.mark.parametrize("name", ["repeat", "packed"])
def test_a_long_run_does_not_come_round_to_its_first_rows(name, corpus):
    """Items past 2^31, where an int32 would be negative."""
    step = 2**31 // B
    source = make(name, corpus)
    expected = rows_by_item(source, range(step * B, (step + 1) * B))
    np.testing.assert_array_equal(source.batches(step, 1)["inputs_BT"][0], expected["inputs_BT"])
    assert step * B < 2**31 < (step + 1) * B


@pytest.mark.parametrize("name", SOURCES)
def test_fc_13b_another_seed_is_another_first_batch_and_the_same_seed_the_same(name, corpus):
    first = [np.asarray(make(name, corpus, seed=seed).batches(0, 1)["inputs_BT"][0]) for seed in (0, 1, 2**31 - 1, 0)]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert (first[i] != first[j]).any()
    np.testing.assert_array_equal(first[0], first[3])


def test_fc_20_no_run_may_have_the_seed_of_the_evaluation_rows():
    assert resolve(Config(seed=2**31 - 1)).seed == 2**31 - 1 < EVAL_SEED < 2**32
    for seed in (2**31, EVAL_SEED, 2**40):
        with pytest.raises(ConfigError, match=rf"config.seed = {seed}: allowed is below 2\^31"):
            resolve(Config(seed=seed))


@pytest.mark.parametrize("name", ["repeat", "trigger"])
def test_fc_20_evaluation_rows_of_a_task_are_of_a_seed_of_their_own(name, corpus):
    source = make(name, corpus)
    tokens = source.evaluation().tokens_RU
    expected = np.asarray(jax.jit(lambda i: tasks.rows(source.task, np.uint32(EVAL_SEED), i))(np.arange(B)))
    np.testing.assert_array_equal(tokens, expected)
    frozen = {row.tobytes() for row in tokens}
    assert len(frozen) == B
    # The same for every run of the task.
    np.testing.assert_array_equal(make(name, corpus, seed=2**31 - 1).evaluation().tokens_RU, tokens)
    for seed in (0, 1, 2**31 - 1):
        other = make(name, corpus, seed=seed)
        for step in range(0, 60, SIZE):
            batch = jax.tree.map(np.asarray, other.batches(step, SIZE))
            rows = np.concatenate([batch["inputs_BT"], batch["targets_BT"][..., -1:]], axis=-1).reshape(-1, T + 1)
            assert not frozen & {row.tobytes() for row in rows}


def test_fc_20_evaluation_rows_and_spans_of_text_are_validation_text(corpus):
    found = [make("packed", corpus, seed=seed) for seed in (0, 1)]
    a, b = (source.evaluation().tokens_RU for source in found)
    np.testing.assert_array_equal(a, b)
    validation = found[0].text.validation.tokens().tobytes()
    spans = found[0].spans(B, 8, 0)
    assert all(row.astype(np.uint16).tobytes() in validation for row in (*a, *spans))
    read = [source.text.rows(np.arange(2 * source.text.num_rows)) for source in found]  # two epochs
    decoded = "".join(found[0].tokenizer.decode(row) for batch in read for row in batch["inputs_BT"])
    assert "train" in decoded and "valid" not in decoded


def test_a_fingerprint_tells_data_from_other_data_not_from_another_order(corpus, tmp_path):
    same = {name: make(name, corpus, (8, 1, 1), seed=5).fingerprint for name in SOURCES}
    assert same == {name: make(name, corpus).fingerprint for name in SOURCES}
    assert len(set(same.values())) == len(SOURCES) - 1  # both packings read one corpus
    texts = [f"valid {i:03d} and more text".encode() for i in range(60)]
    other = prepared(tmp_path, [f"train {i:03d} {'ab' * (i % 9)}train".encode() for i in range(300)], texts)
    assert make("packed", (other, corpus[1])).fingerprint != same["packed"]  # validation alone has changed
