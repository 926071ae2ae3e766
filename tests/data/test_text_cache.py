"""Tokens and tokenizers on disk: made once, found again by what they were made from, whole or not at all."""
import json

import numpy as np
import pytest

from mha_jax.config import ConfigError
from mha_jax.data import corpus, text
from tests.data.text_set import BYTES, TRAIN, VALIDATION, config, prepared, stream_oracle


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


def test_changed_content_of_the_same_sizes_is_tokenised_again(tmp_path, monkeypatch):
    """Letters exchanged in the training documents: name, version, split, number of documents and bytes are the same."""
    other, cache = [document.replace(b"abc", b"cab") for document in TRAIN], tmp_path / "cache"
    folders = [prepared(tmp_path / name, train, VALIDATION) for name, train in (("one", TRAIN), ("two", other))]
    one, two = (corpus.open_documents(folder, "/nowhere", "train").identity for folder in folders)
    assert {key for key in one if one[key] != two[key]} == {"sha256"}
    as_bytes = [text.open_text(config(folder, cache), seed=0) for folder in folders]
    assert [data.train.flat.tolist() for data in as_bytes] == [stream_oracle(folder, "train") for folder in folders]
    assert len(token_files(cache)) == 3  # the validation documents are cut once
    as_bpe = [text.open_text(config(folder, cache, tokenizer="bpe", vocab_size=262), seed=0) for folder in folders]
    assert as_bpe[0].tokenizer != as_bpe[1].tokenizer  # each is trained on its own documents
    # The same content prepared once more, elsewhere, is the same corpus.
    monkeypatch.setattr(text, "_write", lambda *args: pytest.fail("tokenised again"))
    text.open_text(config(prepared(tmp_path / "three", TRAIN, VALIDATION), cache), seed=0)


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
