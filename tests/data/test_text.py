"""Text rows: the stream, row order, packing, evaluation rows and reference lines."""
import dataclasses
import math
from collections import Counter

import numpy as np
import pytest

from mha_jax.config import ConfigError
from mha_jax.data import bigram, cache, text
from mha_jax.data.tokenizer import Tokenizer
from tests.data.text_set import BYTES, TRAIN, VALIDATION, T, config, prepared, stream_oracle, tokens_of


def test_fc_12_stream_is_every_document_and_its_end_and_empty_ones_give_nothing(dataset, data):
    assert data.train.tokens().tolist() == stream_oracle(dataset[0], "train")
    assert data.validation.tokens().tolist() == stream_oracle(dataset[0], "validation")
    assert (data.train.tokens() == 0).sum() == len(data.train.lengths) == 42  # 44 documents, 2 of them empty
    assert "\ufffd\ufffd" in data.tokenizer.decode(data.train.tokens())
    for d, length in enumerate(data.train.lengths):
        document = data.train.tokens()[data.train.starts[d] : data.train.starts[d + 1]]
        assert document[-1] == 0 and length == len(document) - 1 and 0 not in document[:-1]


def test_fc_12_corpus_smaller_than_a_batch_names_both_sizes(dataset):
    rows = math.ceil((len(stream_oracle(dataset[0], "train")) - 1) / T)
    assert text.open_text(config(*dataset, batch_size=rows), seed=0).num_rows == rows
    with pytest.raises(ConfigError, match=rf"{rows} rows .* than config\.data\.batch_size = {rows + 1}"):
        text.open_text(config(*dataset, batch_size=rows + 1), seed=0)


def test_fc_12_corpus_without_text_is_an_error(tmp_path):
    folder = prepared(tmp_path, [b""] * 3, [b"a"])
    with pytest.raises(ConfigError, match=r"no text in split 'train' \(3 documents\)"):
        text.open_text(config(folder, tmp_path / "cache"), seed=0)


def test_rows_tile_the_stream(data):
    flat, size = data.train.tokens().tolist(), 7
    filled = flat + [0] * (-(len(flat) - 1) % size)
    assert len(filled) > len(flat), "the last row is not full"
    data = dataclasses.replace(data, length=size)
    got = data.rows(np.arange(data.num_rows))
    expected = [filled[j * size : j * size + size + 1] for j in range(data.num_rows)]
    assert sorted(tokens_of(got).tolist()) == sorted(expected)
    np.testing.assert_array_equal(got["inputs_BT"][:, 1:], got["targets_BT"][:, :-1])
    dtypes = {key: value.dtype.name for key, value in got.items()}
    assert dtypes == {
        "inputs_BT": "int32",
        "targets_BT": "int32",
        "weights_BT": "float32",
        "positions_BT": "int32",
        "segments_BT": "int32",
    }
    assert f"{data.num_rows} concatenated rows of {size} an epoch; " in data.describe()
    assert "validation tokens in 13 document(s) (split 'validation'), 12 of them long enough" in data.describe()


@pytest.mark.parametrize("packing", ["concatenated", "packed"])
def test_an_epoch_predicts_every_token_once(data, packing):
    """All but the first of the stream, and packed: the first of each document, which nothing in it predicts."""
    flat, data = data.train.tokens(), dataclasses.replace(data, packing=packing, length=7)
    got = data.rows(np.arange(5 * data.num_rows, 6 * data.num_rows))
    real = got["weights_BT"] > 0
    first_of_document = np.append(True, flat[:-1] == 0)
    wanted = flat[~first_of_document] if packing == "packed" else flat[1:]
    assert Counter(got["targets_BT"][real].tolist()) == Counter(wanted.tolist())
    assert (got["weights_BT"][real] == 1).all()


def numbered(num_rows, seed):
    """Text whose row j is all token j + 1, so a row tells its number."""
    flat = np.append(np.repeat(np.arange(num_rows), T), 0).astype(np.uint16)
    stream = cache.Stream((flat,), np.array([0, len(flat)]), np.array([1], np.uint64), "")
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
        assert data.validation.tokens().tolist() == stream_oracle(dataset[0], "validation")  # whatever the seed
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


def windows(data, size):
    """Every run of `size` tokens inside a validation document, its end not included."""
    out = []
    for first, end in zip(data.validation.starts, data.validation.starts[1:], strict=False):
        document = data.validation.tokens()[first : end - 1].tolist()
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


def test_fc_20_validation_documents_that_training_has_too_are_left_out_and_said(tmp_path):
    """A dataset's own splits may meet: no evaluation row, span or line is taken from such a document."""
    both = [f"both {i:02d} have this text".encode() for i in range(8)]
    folder = prepared(tmp_path, [*TRAIN, *both], [*VALIDATION, *both[:5]])
    met = text.open_text(config(folder, tmp_path / "cache"), seed=0)
    rows = met.eval_rows(60, 0)
    assert "; 5 of them left out, their texts are in training too; " in met.describe()
    whole = met.tokenizer.decode(met.validation.tokens())
    own = [d for d in whole.split("<|endoftext|>") if d and not d.startswith("both")]
    assert all(any(met.tokenizer.decode(row) in d for d in own) for row in (*rows, *met.spans(20, 5, 0)))
    possible = sum(max(len(d) - T, 0) for d in own)
    assert possible < len(windows(met, T + 1))
    assert len(met.eval_rows(possible, 1)) == possible
    with pytest.raises(ConfigError, match=rf"eval_rows = {possible + 1} .* hold {possible}, "):
        met.eval_rows(possible + 1, 1)


def test_the_bigram_line_of_a_long_stream_is_fitted_all_along_it(data, monkeypatch):
    monkeypatch.setattr(text, "BIGRAM_TOKENS", 200)
    monkeypatch.setattr(text, "BIGRAM_PIECES", 4)
    fresh = dataclasses.replace(data)
    flat, n = data.train.tokens(), len(data.train)
    pieces = [flat[i : i + 50] for i in np.linspace(0, n - 50, 4).astype(int)]
    expected = bigram.fit(np.concatenate(pieces), 257)
    np.testing.assert_array_equal(fresh._bigram.codes, expected.codes)
    np.testing.assert_array_equal(fresh._bigram.counts, expected.counts)
    assert pieces[-1][-1] == flat[-1]


def test_spans_are_different_and_each_from_one_document(data):
    spans = data.spans(num=6, size=5, seed=0)
    assert spans.shape == (6, 5) and spans.dtype == np.int32
    assert not Counter(map(tuple, spans.tolist())) - Counter(windows(data, 5))
    np.testing.assert_array_equal(spans, data.spans(6, 5, 0))
    with pytest.raises(ConfigError, match="the repeated span = 400 tokens"):
        data.spans(1, 400, 0)


def test_run_tokenizer_takes_the_place_of_the_configured_one(dataset, tmp_path):
    tokenizer = Tokenizer((("a", "b"), ("ab", "c")))
    data = text.open_text(config(dataset[0], tmp_path, vocab_size=259, tokenizer="bpe"), 0, tokenizer)
    assert data.tokenizer is tokenizer and (data.train.tokens() == 258).sum() == b"".join(TRAIN).count(b"abc")


def test_another_vocabulary_than_the_configured_one_is_refused_with_both(dataset, tmp_path):
    """A model of 300 ids would be asked about ids that no text has, or given ids that it has not."""
    with pytest.raises(ConfigError, match=r"config.data.vocab_size = 300: the tokenizer has 259 ids"):
        text.open_text(config(dataset[0], tmp_path, vocab_size=300, tokenizer="bpe"), 0,
                       Tokenizer((("a", "b"), ("ab", "c"))))  # fmt: skip


def test_lines_are_losses_per_prediction_without_bayes(data):
    rows = data.eval_rows(12, 0)
    lines = data.lines(rows)
    assert set(lines) == {"uniform", "unigram", "bigram"} and data.plateau in lines
    assert all(line.shape == (12, T) and np.isfinite(line).all() for line in lines.values())
    np.testing.assert_allclose(lines["uniform"], math.log(257), rtol=1e-15)
    expected = bigram.fit(data.train.tokens(), 257).loss(rows)
    np.testing.assert_array_equal(lines["bigram"], expected)


def test_unigram_line_counts_the_row_so_far(data):
    rows = np.array([[5, 5, 6, 5, 5, 6, 5, 5, 5], [7, 8, 9, 7, 7, 8, 7, 7, 9]], np.int32)

    def loss(b):
        p = [[(list(r[:t]).count(r[t]) + b) / (t + 257 * b) for t in range(1, 9)] for r in rows]
        return -np.log(p)

    best = min((loss(b) for b in np.geomspace(1e-4, 10, 4001)), key=np.mean)
    np.testing.assert_allclose(data.lines(rows)["unigram"], best, atol=1e-2)
    assert data.lines(rows)["unigram"].mean() <= best.mean() + 1e-9
