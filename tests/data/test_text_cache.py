"""Tokens and tokenizers on disk: made once, found again by what they were made from, whole or not at all."""
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mha_jax.config import ConfigError
from mha_jax.data import cache, corpus, text
from tests.data.text_set import BYTES, TRAIN, VALIDATION, config, prepared, stream_oracle

ROOT = pathlib.Path(__file__).parents[2]


def token_files(folder):
    return sorted(path for path in (folder / "tokens").iterdir() if not path.name.startswith("."))


def test_tokens_are_made_once_and_found_by_fingerprint(dataset, tmp_path, monkeypatch):
    first = text.open_text(config(dataset[0], tmp_path), seed=0)
    files = token_files(tmp_path)
    assert len(files) == 2
    monkeypatch.setattr(cache, "_write", lambda *args: pytest.fail("tokenised again"))
    again = text.open_text(config(dataset[0], tmp_path), seed=1)
    np.testing.assert_array_equal(again.train.tokens(), first.train.tokens())
    assert again.train.fingerprint == first.train.fingerprint != first.validation.fingerprint
    assert isinstance(again.train.shards[0].base, np.memmap)
    monkeypatch.undo()
    with_bpe = config(dataset[0], tmp_path, tokenizer="bpe", vocab_size=262)
    bpe = text.open_text(with_bpe, seed=0)
    assert len(token_files(tmp_path)) == 4 and set(files) < set(token_files(tmp_path))
    assert bpe.tokenizer.vocab_size == 262 and len(bpe.train.tokens()) < len(first.train.tokens())
    monkeypatch.setattr(text, "train_bpe", lambda *args: pytest.fail("trained again"))
    assert text.open_text(with_bpe, seed=0).tokenizer == bpe.tokenizer


def test_changed_content_of_the_same_sizes_is_tokenised_again(tmp_path, monkeypatch):
    """Letters exchanged in the training documents: name, version, split, number of documents and bytes are the same."""
    other, folder = [document.replace(b"abc", b"cab") for document in TRAIN], tmp_path / "cache"
    folders = [prepared(tmp_path / name, train, VALIDATION) for name, train in (("one", TRAIN), ("two", other))]
    one, two = (corpus.open_documents(at, "/proc/nowhere", "train").identity for at in folders)
    assert {key for key in one if one[key] != two[key]} == {"sha256"}
    as_bytes = [text.open_text(config(at, folder), seed=0) for at in folders]
    assert [data.train.tokens().tolist() for data in as_bytes] == [stream_oracle(at, "train") for at in folders]
    assert len(token_files(folder)) == 3  # the validation documents are cut once
    as_bpe = [text.open_text(config(at, folder, tokenizer="bpe", vocab_size=262), seed=0) for at in folders]
    assert as_bpe[0].tokenizer != as_bpe[1].tokenizer  # each is trained on its own documents
    # The same content prepared once more, elsewhere, is the same corpus.
    monkeypatch.setattr(cache, "_write", lambda *args: pytest.fail("tokenised again"))
    text.open_text(config(prepared(tmp_path / "three", TRAIN, VALIDATION), folder), seed=0)


def shards_of(folder):
    return sorted(path.name for path in folder.glob("*.tokens.npy"))


@pytest.fixture
def small_shards(monkeypatch):
    """Shards of a few documents."""
    monkeypatch.setattr(cache, "SHARD_TOKENS", 40)
    monkeypatch.setattr(cache, "BATCH_CHARACTERS", 20)


@pytest.mark.usefixtures("small_shards")
def test_shards_are_one_stream(dataset, data, tmp_path):
    """Whatever the shards, the tokens, documents and rows are the same, and so is the hash."""
    found = text.open_text(config(*dataset[:1], tmp_path), seed=0)
    assert len(found.train.shards) > 5 and len(data.train.shards) == 1
    assert all(isinstance(shard.base, np.memmap) for shard in found.train.shards)
    assert found.train.fingerprint == data.train.fingerprint
    np.testing.assert_array_equal(found.train.tokens(), data.train.tokens())
    np.testing.assert_array_equal(found.train.starts, data.train.starts)
    for first, stop in ((0, 3), (17, 200), (39, 41), (60, 60), (len(data.train) - 3, len(data.train) + 9)):
        np.testing.assert_array_equal(found.train.tokens(first, stop), data.train.tokens()[first:stop])
    for key, rows in data.rows(np.arange(data.num_rows)).items():
        np.testing.assert_array_equal(found.rows(np.arange(data.num_rows))[key], rows)
    np.testing.assert_array_equal(found.eval_rows(20, 3), data.eval_rows(20, 3))


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize(("where", "call", "n"), [(np, "save", 1), (np, "save", 8), (cache.os, "replace", 11),
                                                  (cache.os, "rename", 1)])  # fmt: skip
def test_what_was_interrupted_is_never_read_and_is_continued(dataset, data, tmp_path, monkeypatch, where, call, n):
    original, calls, encoded = getattr(where, call), [], []

    def fail_at_n(*args):
        calls.append(args)
        if len(calls) == n:
            raise OSError("No space left on device")
        original(*args)

    monkeypatch.setattr(where, call, fail_at_n)
    with pytest.raises(ConfigError, match=r"cache_dir = .*No space left on device"):
        text.open_text(config(dataset[0], tmp_path), seed=0)
    assert token_files(tmp_path) == []
    monkeypatch.undo()
    monkeypatch.setattr(cache, "SHARD_TOKENS", 40)
    monkeypatch.setattr(cache, "BATCH_CHARACTERS", 20)
    encode = BYTES.encode_batch
    monkeypatch.setattr(type(BYTES), "encode_batch", lambda self, texts: (encoded.extend(texts), encode(texts))[1])
    again = text.open_text(config(dataset[0], tmp_path), seed=0)
    assert again.train.fingerprint == data.train.fingerprint
    assert again.train.tokens().tolist() == stream_oracle(dataset[0], "train")
    whole = len(TRAIN) + len(VALIDATION)
    assert len(encoded) == whole if n == 1 and call == "save" else len(encoded) < whole, "shards are not made again"


KILLED = """
import sys
from mha_jax.data import cache, text
from tests.data.text_set import config
cache.SHARD_TOKENS, cache.BATCH_CHARACTERS = 40, 20
save, calls = cache._save, []
def slow(path, array):
    calls.append(path)
    if len(calls) == 10:  # lengths, hashes and tokens of three shards are there
        path.with_name(path.name + ".half").write_bytes(b"half")
        print("now", flush=True)
        sys.stdin.read()
    save(path, array)
cache._save = slow
text.open_text(config(*sys.argv[1:]), seed=0)
"""


def test_kill_9_in_the_middle_and_the_same_hash_after_it(dataset, data, tmp_path, monkeypatch):
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    child = subprocess.Popen([sys.executable, "-c", KILLED, dataset[0], str(tmp_path)], env=env, stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE)  # fmt: skip
    assert child.stdout.readline() == b"now\n"
    child.kill()
    assert child.wait() == -signal.SIGKILL
    (half,) = (tmp_path / "tokens").glob(".*.half")
    assert len(shards_of(half)) == 3 and token_files(tmp_path) == []
    encode, encoded = BYTES.encode_batch, []
    monkeypatch.setattr(type(BYTES), "encode_batch", lambda self, texts: (encoded.extend(texts), encode(texts))[1])
    again = text.open_text(config(dataset[0], tmp_path), seed=0)
    assert len(encoded) < len(TRAIN) + len(VALIDATION) - 3, "whole shards are not made again"
    assert again.train.fingerprint == data.train.fingerprint and not list((tmp_path / "tokens").glob(".*.half"))
    np.testing.assert_array_equal(again.train.tokens(), data.train.tokens())


def test_a_damaged_shard_of_an_interrupted_start_is_made_again(dataset, data, tmp_path, monkeypatch, small_shards):
    monkeypatch.setattr(cache.os, "rename", lambda *_: (_ for _ in ()).throw(OSError("killed")))
    with pytest.raises(ConfigError):
        text.open_text(config(dataset[0], tmp_path), seed=0)
    monkeypatch.undo()
    (half,) = (tmp_path / "tokens").glob(".*.half")
    (half / "00002.lengths.npy").write_bytes(b"")
    (half / "00004.tokens.npy").write_bytes((half / "00004.tokens.npy").read_bytes()[:-4])
    again = text.open_text(config(dataset[0], tmp_path), seed=0)
    assert again.train.fingerprint == data.train.fingerprint
    assert again.train.tokens().tolist() == stream_oracle(dataset[0], "train")


def test_a_damaged_note_of_a_hash_is_not_believed(dataset, tmp_path):
    cache_dir = tmp_path / "cache"
    first = text.open_text(config(dataset[0], cache_dir), seed=0)
    for note in (cache_dir / "tfds" / ".hashes").iterdir():
        note.write_text("")
    assert text.open_text(config(dataset[0], cache_dir), seed=0).train.fingerprint == first.train.fingerprint
    assert len(token_files(cache_dir)) == 2


@pytest.mark.parametrize("damage", ["cut", "other", "gone", "flipped", "shifted", "meta"])
def test_damaged_tokens_are_refused_by_name(dataset, tmp_path, damage):
    text.open_text(config(dataset[0], tmp_path), seed=0)
    for folder in token_files(tmp_path):
        path = folder / "00000.tokens.npy"
        match damage:
            case "cut":
                path.write_bytes(path.read_bytes()[:-10])
            case "other":
                np.save(path, np.load(path)[:-3])
            case "gone":
                path.unlink()
            case "flipped":
                tokens = np.load(path)
                tokens[3] ^= 1
                np.save(path, tokens)
            case "shifted":
                lengths = np.load(folder / "00000.lengths.npy")
                lengths[0], lengths[1] = lengths[0] + lengths[1], 0
                np.save(folder / "00000.lengths.npy", lengths)
            case "meta":
                (folder / "meta.json").write_text("[]")
    with pytest.raises(ConfigError, match=rf"{tmp_path}/tokens/.*delete this folder"):
        text.open_text(config(dataset[0], tmp_path), seed=0)


HOLDER = """
import fcntl, sys
lock = open(sys.argv[1], "w")
fcntl.lockf(lock, fcntl.LOCK_EX)
print("mine", flush=True)
sys.stdin.read()
"""


def test_two_processes_do_not_do_the_same_work_at_once(dataset, tmp_path):
    """The second waits until the first is done, or dead."""
    documents = corpus.open_documents(dataset[0], tmp_path, "train")
    key = cache.digest({"format": cache.FORMAT, "corpus": documents.identity, "tokenizer": BYTES.fingerprint})
    (tmp_path / "tokens").mkdir()
    child = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "tokens" / f".{key}.lock")],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    assert child.stdout.readline() == b"mine\n"
    with ThreadPoolExecutor() as pool:
        found = pool.submit(cache.tokenise, documents, BYTES, tmp_path)
        time.sleep(0.3)
        assert not found.done() and token_files(tmp_path) == []
        child.kill()
        assert found.result(20).tokens().tolist() == stream_oracle(dataset[0], "train")
    child.wait()


def test_unusable_cache_folder_is_a_config_error(dataset, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"config\.data\.cache_dir = .*Not a directory"):
        text.open_text(config(dataset[0], tmp_path / "file"), seed=0)


def test_meta_says_what_the_tokens_are(dataset, data):
    metas = [json.loads((folder / "meta.json").read_text()) for folder in token_files(dataset[1])]
    meta = next(m for m in metas if m["tokens"] == len(data.train.tokens()) and m["corpus"]["split"] == "train")
    assert (meta["documents"], meta["left_out"], meta["eot"]) == (42, {"without_tokens": 2}, 0)
    assert meta["tokenizer"] == BYTES.fingerprint and meta["corpus"]["name"] == "text_set"
