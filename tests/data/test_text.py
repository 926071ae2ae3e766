"""Text rows: the stream, its cache, row order, packing, evaluation rows and reference lines."""

import dataclasses
import json
import math
from collections import Counter

import numpy as np
import pytest
import tensorflow_datasets as tfds

from mha_jax.config import ConfigError, DataConfig
from mha_jax.data import corpus, text
from mha_jax.data.tokenizer import Tokenizer

T = 8
BYTES = Tokenizer()


class TextSet(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """A dataset of given texts, {split: [bytes, ..]}."""

    name = "text_set"
    VERSION = tfds.core.Version("1.0.0")

    def __init__(self, splits, **kwargs):
        self.splits = splits
        super().__init__(file_format="array_record", **kwargs)

    def _info(self):
        features = tfds.features.FeaturesDict({"text": tfds.features.Text()})
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        return {name: ((i, {"text": t}) for i, t in enumerate(texts)) for name, texts in self.splits.items()}

    def _generate_examples(self):
        raise AssertionError("unused")


def prepared(folder, train, validation):
    builder = TextSet({"train": train, "validation": validation}, data_dir=folder / "tfds")
    return str(corpus.prepare(builder).data_dir)


def config(dataset, cache_dir, **changes):
    defaults = {"task": "text", "tokenizer": "bytes", "length": T, "batch_size": 4, "vocab_size": 257}
    return DataConfig(dataset=dataset, cache_dir=str(cache_dir), **defaults | changes)


TRAIN = [f"train {i:02d} ".encode() + b"abc" * (i % 5) for i in range(40)] + [b"", b"x", b"\xff\xfe", b""]
VALIDATION = [f"valid {i:02d} ".encode() + b"xyz" * (i % 7) for i in range(12)] + [b"", b"y"]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """(folder of the dataset, cache folder)"""
    tmp = tmp_path_factory.mktemp("text")
    return prepared(tmp, TRAIN, VALIDATION), tmp / "cache"


@pytest.fixture(scope="module")
def data(dataset):
    return text.open_text(config(*dataset), seed=0)


def stream_oracle(dataset, split):
    """Byte values + 1 of the documents in the dataset's own order, each followed by 0."""
    out = []
    for document in tfds.builder_from_directory(dataset).as_data_source(split=split):
        content = document["text"].decode("utf-8", "replace").encode()
        out += [b + 1 for b in content] + [0] * bool(content)
    return out


def tokens_of(batch):
    return np.concatenate([batch["inputs_BT"], batch["targets_BT"][:, -1:]], axis=1)


def test_fc_12_stream_is_every_document_and_its_end_and_empty_ones_give_nothing(dataset, data):
    assert data.train.flat.tolist() == stream_oracle(dataset[0], "train")
    assert data.validation.flat.tolist() == stream_oracle(dataset[0], "validation")
    assert (data.train.flat == 0).sum() == len(data.train.lengths) == 42  # 44 documents, 2 of them empty
    assert "\ufffd\ufffd" in data.tokenizer.decode(data.train.flat)
    for d, length in enumerate(data.train.lengths):
        document = data.train.flat[data.train.starts[d] : data.train.starts[d + 1]]
        assert document[-1] == 0 and length == len(document) - 1 and 0 not in document[:-1]


def test_fc_12_corpus_smaller_than_a_batch_names_both_sizes(dataset):
    rows = (len(stream_oracle(dataset[0], "train")) - 1) // T
    assert text.open_text(config(*dataset, batch_size=rows), seed=0).num_rows == rows
    with pytest.raises(ConfigError, match=rf"{rows} rows .* than config\.data\.batch_size = {rows + 1}"):
        text.open_text(config(*dataset, batch_size=rows + 1), seed=0)


def test_fc_12_corpus_without_text_is_an_error(tmp_path):
    folder = prepared(tmp_path, [b""] * 3, [b"a"])
    with pytest.raises(ConfigError, match=r"no text in split 'train' \(3 documents\)"):
        text.open_text(config(folder, tmp_path / "cache"), seed=0)


def test_rows_tile_the_stream(data):
    flat = data.train.flat.tolist()
    expected = sorted(flat[j * T : j * T + T + 1] for j in range((len(flat) - 1) // T))
    got = data.rows(np.arange(data.num_rows))
    assert sorted(tokens_of(got).tolist()) == expected
    np.testing.assert_array_equal(got["inputs_BT"][:, 1:], got["targets_BT"][:, :-1])
    dtypes = {key: value.dtype.name for key, value in got.items()}
    assert dtypes == {
        "inputs_BT": "int32",
        "targets_BT": "int32",
        "weights_BT": "float32",
        "positions_BT": "int32",
        "segments_BT": "int32",
    }
    dropped = len(flat) - 1 - data.num_rows * T
    assert f"{data.num_rows} concatenated rows of {T} an epoch ({dropped} tokens dropped)" in data.describe()


def numbered(num_rows, seed):
    """Text whose row j is all token j + 1, so a row tells its number."""
    flat = np.append(np.repeat(np.arange(num_rows), T), 0).astype(np.uint16)
    stream = text.Stream(flat, np.array([0, len(flat)]), "")
    return text.TextData(BYTES, stream, stream, length=T, seed=seed, packing="concatenated")


def order(data, items):
    return data.rows(np.asarray(items))["inputs_BT"][:, 0].tolist()


@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1])
def test_fc_11_every_epoch_is_another_permutation(seed):
    rows = 50
    data = numbered(rows, seed)
    epochs = [order(data, range(e * rows, (e + 1) * rows)) for e in range(4)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(rows))
    assert len(set(map(tuple, epochs))) == 4
    assert epochs == [order(numbered(rows, seed), range(e * rows, (e + 1) * rows)) for e in range(4)]


def test_fc_11_resumed_and_repeated_steps_see_the_same_batches():
    rows, batch = 50, 8  # 30 steps cross four epochs, in the middle of batches
    whole = numbered(rows, 3)
    steps = [order(whole, range(s * batch, (s + 1) * batch)) for s in range(30)]
    for start in (10, 15, 20):
        resumed = numbered(rows, 3)
        assert [order(resumed, range(s * batch, (s + 1) * batch)) for s in range(start, 30)] == steps[start:]
    assert [order(whole, [i])[0] for i in range(240)] == [
        row for step in steps for row in step
    ]  # a row does not depend on its batch


def test_fc_13_seeds_differ_in_their_first_batch_and_equal_seeds_agree():
    assert order(numbered(50, 0), range(8)) != order(numbered(50, 1), range(8))
    assert order(numbered(50, 1), range(8)) == order(numbered(50, 1), range(8))


def test_fc_20_validation_never_meets_training_in_any_epoch_process_or_seed(dataset):
    validation = {f"{i:02d}" for i in range(12)}
    assert validation <= {t[6:8].decode() for t in TRAIN[:40]}  # the numbers do meet; the words tell
    for seed in (0, 1, 2):
        data = text.open_text(config(*dataset, length=16), seed=seed)
        assert data.validation.flat.tolist() == stream_oracle(dataset[0], "validation")  # whatever the seed
        items = np.arange(3 * data.num_rows)
        parts = [tokens_of(data.rows(items[process::4])) for process in range(4)]
        seen = "".join(data.tokenizer.decode(row) for part in parts for row in part)
        assert "vali" not in seen and "xyz" not in seen and "train" in seen
        assert "tra" not in "".join(data.tokenizer.decode(row) for row in data.eval_rows(20, seed))


def packed(row):
    return text.annotate(np.array([row], np.int32), eot=0, packing="packed")


A, B = [11, 12, 13, 14, 15, 16, 17], [21, 22, 23, 24, 25, 26, 27, 28, 29]


def test_fc_07_packed_documents_by_hand():
    got = packed([*A, 0, *B])
    assert got["inputs_BT"].tolist() == [[*A, 0, *B[:-1]]]
    assert got["targets_BT"].tolist() == [[*A[1:], 0, *B]]
    assert got["segments_BT"].tolist() == [[1] * 8 + [2] * 8]
    assert got["positions_BT"].tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7]]
    assert got["weights_BT"].tolist() == [[1.0] * 7 + [0.0] + [1.0] * 8]  # EOT -> first of B is not a target


def test_fc_07_replacing_the_first_document_leaves_the_second():
    one, other = packed([*A, 0, *B]), packed([31, 32, 33, 34, 35, 36, 37, 0, *B])
    alone = packed(B)
    for key in one:
        np.testing.assert_array_equal(one[key][:, 8:], other[key][:, 8:])
        shift = 1 if key == "segments_BT" else 0  # the same document, numbered in its row
        np.testing.assert_array_equal(one[key][:, 8:] - shift, alone[key])


def test_fc_07_row_edges_and_many_documents():
    got = packed([0, 5, 0, 6, 7, 0, 8])  # the row starts with the end of a document it does not show
    assert got["segments_BT"].tolist() == [[1, 2, 2, 3, 3, 3]]
    assert got["positions_BT"].tolist() == [[0, 0, 1, 0, 1, 2]]
    assert got["weights_BT"].tolist() == [[0, 1, 0, 1, 1, 0]]
    last = packed([5, 6, 0])  # an end as the last target is predicted like any token
    assert last["weights_BT"].tolist() == [[1, 1]] and last["segments_BT"].tolist() == [[1, 1]]


def test_fc_07_concatenated_documents_run_on_and_the_setting_is_said(data):
    got = text.annotate(np.array([[*A, 0, *B]], np.int32), eot=0, packing="concatenated")
    assert got["segments_BT"].tolist() == [[1] * 16]
    assert got["positions_BT"].tolist() == [list(range(16))]
    assert got["weights_BT"].tolist() == [[1.0] * 16]
    assert "concatenated" in data.describe()
    assert "packed" in dataclasses.replace(data, packing="packed").describe()


def test_packed_and_concatenated_rows_hold_the_same_tokens(data):
    items = np.arange(20)
    other = dataclasses.replace(data, packing="packed").rows(items)
    np.testing.assert_array_equal(other["inputs_BT"], data.rows(items)["inputs_BT"])
    assert (other["weights_BT"] == (other["inputs_BT"] != 0)).all() and other["segments_BT"].max() > 1


def test_train_row_is_one_row_of_the_batch(data):
    data = dataclasses.replace(data, packing="packed")
    batch = data.rows(np.arange(30))
    for i in (0, 7, 29):
        tokens_U, positions_T, segments_T = data.train_row(i)
        np.testing.assert_array_equal(tokens_U, tokens_of(batch)[i])
        np.testing.assert_array_equal(positions_T, batch["positions_BT"][i])
        np.testing.assert_array_equal(segments_T, batch["segments_BT"][i])


def windows(data, size):
    """Every run of `size` tokens inside a validation document, its end not included."""
    out = []
    for first, end in zip(data.validation.starts, data.validation.starts[1:], strict=False):
        document = data.validation.flat[first : end - 1].tolist()
        out += [tuple(document[i : i + size]) for i in range(len(document) - size + 1)]
    return out


def test_eval_rows_are_uniform_over_the_offsets_inside_documents(data):
    every = windows(data, T + 1)
    rows = data.eval_rows(len(every), seed=5)
    assert rows.dtype == np.int32
    assert Counter(map(tuple, rows.tolist())) == Counter(every)  # all of them, none twice
    few = [tuple(data.eval_rows(1, seed)[0].tolist()) for seed in range(400)]
    assert set(few) <= set(every) and len(set(few)) > 0.6 * len(set(every))


def test_eval_rows_are_frozen_by_their_seed(data):
    np.testing.assert_array_equal(data.eval_rows(10, 1), data.eval_rows(10, 1))
    np.testing.assert_array_equal(data.eval_rows(10, 1), dataclasses.replace(data, seed=9).eval_rows(10, 1))
    assert (data.eval_rows(10, 1) != data.eval_rows(10, 2)).any()


def test_fc_12_too_little_validation_text_names_both_sizes(data):
    total = len(windows(data, T + 1))
    with pytest.raises(ConfigError, match=rf"eval_rows = {total + 1} .* = {T + 1} tokens .* hold {total}, "):
        data.eval_rows(total + 1, 0)
    longest = max(len(t) for t in VALIDATION)
    with pytest.raises(ConfigError, match=rf"= {longest + 1} tokens .* hold 0, the longest has {longest}"):
        dataclasses.replace(data, length=longest).eval_rows(1, 0)


def test_repeated_spans_are_periodic_and_from_one_document(data):
    tokens = data.repeated_spans(num=6, span=5, length=17, seed=0)
    assert tokens.shape == (6, 17) and tokens.dtype == np.int32
    np.testing.assert_array_equal(tokens[:, 5:], tokens[:, :-5])
    assert {tuple(row) for row in tokens[:, :5].tolist()} <= set(windows(data, 5))
    np.testing.assert_array_equal(tokens, data.repeated_spans(6, 5, 17, 0))
    with pytest.raises(ConfigError, match="the repeated span = 400 tokens"):
        data.repeated_spans(1, 400, 800, 0)


def token_files(cache):
    return sorted((cache / "tokens").iterdir())


def test_tokens_are_made_once_and_found_by_fingerprint(dataset, tmp_path, monkeypatch):
    first = text.open_text(config(dataset[0], tmp_path), seed=0)
    files = token_files(tmp_path)
    assert len(files) == 2
    monkeypatch.setattr(text, "_write", lambda *args: pytest.fail("tokenised again"))
    again = text.open_text(config(dataset[0], tmp_path), seed=1)
    np.testing.assert_array_equal(again.train.flat, first.train.flat)
    assert again.train.fingerprint == first.train.fingerprint != first.validation.fingerprint
    assert isinstance(again.train.flat.base, np.memmap)
    monkeypatch.undo()
    with_bpe = config(dataset[0], tmp_path, tokenizer="bpe", vocab_size=262)
    bpe = text.open_text(with_bpe, seed=0)
    assert len(token_files(tmp_path)) == 4 and set(files) < set(token_files(tmp_path))
    assert bpe.tokenizer.vocab_size == 262 and len(bpe.train.flat) < len(first.train.flat)
    monkeypatch.setattr(text, "train_bpe", lambda *args: pytest.fail("trained again"))
    assert text.open_text(with_bpe, seed=0).tokenizer == bpe.tokenizer


def test_another_corpus_of_the_same_name_has_other_tokens(dataset, data, tmp_path):
    other = prepared(tmp_path, [b"other text, longer than a row of nine tokens" * 3], VALIDATION)
    assert text.open_text(config(other, dataset[1]), seed=0).train.flat.tolist() != data.train.flat.tolist()


def test_run_tokenizer_takes_the_place_of_the_configured_one(dataset, tmp_path):
    tokenizer = Tokenizer((("a", "b"), ("ab", "c")))
    data = text.open_text(config(dataset[0], tmp_path, vocab_size=300, tokenizer="bpe"), 0, tokenizer)
    assert data.tokenizer is tokenizer and (data.train.flat == 258).sum() == b"".join(TRAIN).count(b"abc")


@pytest.mark.parametrize(("where", "call", "n"), [(np, "save", 2), (text.os, "rename", 1)])
def test_half_written_tokens_are_never_used(dataset, tmp_path, monkeypatch, where, call, n):
    original, calls = getattr(where, call), []

    def fail_at_n(*args):
        calls.append(args)
        if len(calls) == n:
            raise OSError("No space left on device")
        original(*args)

    monkeypatch.setattr(where, call, fail_at_n)
    with pytest.raises(ConfigError, match=r"cache_dir = .*No space left on device"):
        text.open_text(config(dataset[0], tmp_path), seed=0)
    assert token_files(tmp_path) == []
    # A process that was killed leaves its half: nothing reads it.
    (tmp_path / "tokens" / ".half-killed").mkdir()
    (tmp_path / "tokens" / ".half-killed" / "tokens.npy").write_bytes(b"\x93NUMPY")
    monkeypatch.undo()
    data = text.open_text(config(dataset[0], tmp_path), seed=0)
    assert data.train.flat.tolist() == stream_oracle(dataset[0], "train")


@pytest.mark.parametrize("damage", ["cut", "other", "gone"])
def test_damaged_tokens_are_refused_by_name(dataset, tmp_path, damage):
    text.open_text(config(dataset[0], tmp_path), seed=0)
    for folder in token_files(tmp_path):
        path = folder / "tokens.npy"
        match damage:
            case "cut":
                path.write_bytes(path.read_bytes()[:-10])
            case "other":
                np.save(path, np.load(path)[:-3])
            case "gone":
                path.unlink()
    with pytest.raises(ConfigError, match=rf"{tmp_path}/tokens/.*delete this folder"):
        text.open_text(config(dataset[0], tmp_path), seed=0)


def test_two_processes_tokenising_at_once_both_succeed(dataset, tmp_path, monkeypatch):
    documents = corpus.open_documents(dataset[0], tmp_path, "train")
    write = text._write
    monkeypatch.setattr(text, "_write", lambda *args: (write(*args), write(*args)))
    assert text.tokenise(documents, BYTES, tmp_path).flat.tolist() == stream_oracle(dataset[0], "train")
    assert len(token_files(tmp_path)) == 1


def test_unusable_cache_folder_is_a_config_error(dataset, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"config\.data\.cache_dir = .*Not a directory"):
        text.open_text(config(dataset[0], tmp_path / "file"), seed=0)


def test_meta_says_what_the_tokens_are(dataset, data):
    metas = [json.loads((folder / "meta.json").read_text()) for folder in token_files(dataset[1])]
    meta = next(m for m in metas if m["tokens"] == len(data.train.flat) and m["corpus"]["split"] == "train")
    assert (meta["documents"], meta["left_out_without_tokens"], meta["eot"]) == (42, 2, 0)
    assert meta["tokenizer"] == BYTES.fingerprint and meta["corpus"]["name"] == "text_set"


@pytest.mark.parametrize("discount", [0.05, 0.5, 0.95])
def test_bigram_is_a_distribution_after_every_token(discount):
    flat = np.random.default_rng(0).integers(0, 6, 40)
    bigram = text.Bigram(*text._pairs(flat, 9), discount, 9)  # tokens 6, 7, 8 never occur
    for a in range(9):
        rows = np.array([[a, b] for b in range(9)])
        assert np.exp(-bigram.loss(rows)).sum() == pytest.approx(1, abs=1e-12)


def test_bigram_by_hand():
    # 0 1 0 1 0 2: pairs 01 twice, 10 twice, 02 once; second tokens 1 1 0 0 2, V = 4, p(b) = (n_b + 1) / 9.
    bigram = text.Bigram(*text._pairs(np.array([0, 1, 0, 1, 0, 2]), 4), 0.5, 4)
    expected = {
        (0, 1): 1.5 / 3 + 0.5 * 2 / 3 * 3 / 9,
        (0, 2): 0.5 / 3 + 0.5 * 2 / 3 * 2 / 9,
        (0, 3): 0.5 * 2 / 3 * 1 / 9,
        (1, 0): 1.5 / 2 + 0.5 / 2 * 3 / 9,
        (3, 0): 3 / 9,
    }
    for pair, p in expected.items():
        assert bigram.loss(np.array([pair]))[0, 0] == pytest.approx(-math.log(p), abs=1e-12)


def test_bigram_reaches_the_entropy_rate_of_a_markov_chain():
    rng = np.random.default_rng(0)
    table = rng.dirichlet([0.3] * 8, 8)
    chain = [0]
    for u in rng.random(60_000):
        chain.append(min(int(np.searchsorted(np.cumsum(table[chain[-1]]), u)), 7))
    train, test = np.array(chain[:40_000], np.uint16), np.array(chain[40_000:])[None]
    exact = -np.log(table[test[0, :-1], test[0, 1:]]).mean()
    assert text.fit_bigram(train, 8).loss(test).mean() == pytest.approx(exact, abs=0.003)


def test_bigram_discount_is_the_best_on_held_out_training_tokens():
    flat = np.random.default_rng(1).integers(0, 30, 2_000) // 2 * 2
    cut = len(flat) - 100
    part = text._pairs(flat[:cut], 40)
    candidates = {d: text.Bigram(*part, d / 100, 40) for d in range(5, 100, 5)}
    held_out = {d: bigram.loss(flat[None, cut - 1 :]).mean() for d, bigram in candidates.items()}
    assert text.fit_bigram(flat, 40).discount == min(held_out, key=held_out.get) / 100


def test_lines_are_losses_per_prediction_without_bayes(data):
    rows = data.eval_rows(12, 0)
    lines = data.lines(rows)
    assert set(lines) == {"uniform", "unigram", "bigram"} and data.plateau in lines
    assert all(line.shape == (12, T) and np.isfinite(line).all() for line in lines.values())
    np.testing.assert_allclose(lines["uniform"], math.log(257), rtol=1e-15)
    expected = text.fit_bigram(data.train.flat, 257).loss(rows)
    np.testing.assert_array_equal(lines["bigram"], expected)


def test_unigram_line_counts_the_row_so_far(data):
    rows = np.array([[5, 5, 6, 5, 5, 6, 5, 5, 5], [7, 8, 9, 7, 7, 8, 7, 7, 9]], np.int32)

    def loss(b):
        p = [[(list(r[:t]).count(r[t]) + b) / (t + 257 * b) for t in range(1, 9)] for r in rows]
        return -np.log(p)

    best = min((loss(b) for b in np.geomspace(1e-4, 10, 4001)), key=np.mean)
    np.testing.assert_allclose(data.lines(rows)["unigram"], best, atol=1e-2)
    assert data.lines(rows)["unigram"].mean() <= best.mean() + 1e-9
