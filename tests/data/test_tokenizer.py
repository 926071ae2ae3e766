"""Tokenizers: exact round trips, hand-worked merges, fingerprints."""

import itertools
import json
import random

import numpy as np
import pytest

from mha_jax.config import ConfigError
from mha_jax.data.tokenizer import Tokenizer, train_bpe

SPACE = "Ġ"  # how byte-level BPE writes the byte 0x20
TEXTS = ["def attend(query, key):\n    return softmax(query @ key)\n" * 3, "naïve café 漢字 🙂\n" * 4]
BPE = train_bpe(TEXTS, 300)
BYTES = Tokenizer()


def random_text(seed, size=500):
    rng = random.Random(seed)
    points = [p for p in (rng.randrange(0x110000) for _ in range(size)) if not 0xD800 <= p < 0xE000]
    return "".join(map(chr, points))


@pytest.mark.parametrize("tokenizer", [BPE, BYTES], ids=["bpe", "bytes"])
@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "\x00",
        "  \n\t\r\n  ",
        "e\u0301 vs é",
        "<|endoftext|>",
        "a<|endoftext|>b",
        "\ufffd",
        "".join(TEXTS),
        "".join(map(chr, range(0x3000))),
        random_text(0),
        random_text(1),
    ],
)
def test_fc_12_round_trip_is_exact_and_no_text_ends_a_document(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and ids.ndim == 1
    assert tokenizer.decode(ids) == text
    assert tokenizer.eot not in ids and (ids < tokenizer.vocab_size).all()


def test_bytes_are_their_value_plus_one():
    assert BYTES.vocab_size == 257 and BYTES.eot == 0
    text = "aé\x00\n"
    assert BYTES.encode(text).tolist() == [b + 1 for b in text.encode()] == [98, 196, 170, 1, 11]


def test_merges_by_hand():
    # Words 'ab', ' ab', ' ab', ' abc': a-b 4 times, space-a 3 times; then space-ab 3 times, ab-c once.
    tokenizer = train_bpe(["ab ab", " ab abc"], 259)
    assert tokenizer.merges == (("a", "b"), (SPACE, "ab"))
    assert tokenizer.encode("ab ab abc c").tolist() == [257, 258, 258, 100, 33, 100]
    assert [tokenizer.decode([i]) for i in (0, 257, 258)] == ["<|endoftext|>", "ab", " ab"]


def test_encoding_is_the_earliest_merge_first():
    """Against byte pair encoding written out, on words that the pre-tokenizer cannot cut."""
    rank = {pair: i for i, pair in enumerate(BPE.merges)}

    def oracle(word):
        parts = list(word)
        while pairs := [(rank[p], i) for i, p in enumerate(itertools.pairwise(parts)) if p in rank]:
            i = min(pairs)[1]
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        return parts

    for word in ("query", "attend", "softmax", "keyquery", "returnreturn", "zzz"):
        assert [BPE.decode([i]) for i in BPE.encode(word)] == oracle(word)


def test_vocabulary_is_as_asked_and_its_ids_differ():
    assert BPE.vocab_size == 300
    decoded = [BPE._token_bytes[i] for i in range(300)]
    assert len(set(decoded)) == 300
    assert decoded[1:257] == [bytes([b]) for b in range(256)]


def test_training_is_deterministic_and_order_of_equal_counts_too():
    again = train_bpe(TEXTS, 300)
    assert again == BPE and again.fingerprint == BPE.fingerprint
    assert train_bpe((text for text in TEXTS), 300) == BPE


def test_batch_equals_single_texts():
    batch = ["", "query key", *TEXTS]
    for ids, text in zip(BPE.encode_batch(batch), batch, strict=True):
        np.testing.assert_array_equal(ids, BPE.encode(text))


def test_ids_without_a_text_decode_to_the_replacement_character():
    assert BYTES.decode([98, 257 + 5, -200, 196]) == "a\ufffd\ufffd\ufffd"


def test_lone_surrogate_is_refused():
    with pytest.raises(UnicodeEncodeError, match="surrogates not allowed"):
        BPE.encode("a\ud800")


def test_fingerprints_tell_tokenizers_apart():
    others = [BYTES, train_bpe(TEXTS, 299), Tokenizer(BPE.merges[::-1])]
    assert len({t.fingerprint for t in [BPE, *others]}) == 4
    assert len(BPE.fingerprint) == 64 and int(BPE.fingerprint, 16) > 0


@pytest.mark.parametrize("tokenizer", [BPE, BYTES], ids=["bpe", "bytes"])
def test_save_and_load(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["tokenizer.json"]
    loaded = Tokenizer.load(path)
    assert loaded == tokenizer and loaded.fingerprint == json.loads(path.read_text())["fingerprint"]
    np.testing.assert_array_equal(loaded.encode(TEXTS[0]), tokenizer.encode(TEXTS[0]))


def test_changed_file_is_refused_by_name(tmp_path):
    path = tmp_path / "tokenizer.json"
    BPE.save(path)
    content = json.loads(path.read_text())
    content["merges"][0], content["merges"][1] = content["merges"][1], content["merges"][0]
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=rf"{path}: fingerprint .* not the stated {BPE.fingerprint[:12]}"):
        Tokenizer.load(path)


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"merges": [["a"]], "fingerprint": ""}'])
def test_other_files_are_refused_by_name(content, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=f"{path}: not a tokenizer of ours"):
        Tokenizer.load(path)
    with pytest.raises(ConfigError, match="FileNotFoundError"):
        Tokenizer.load(tmp_path / "absent.json")


def test_vocabulary_the_text_cannot_fill_names_both_sizes():
    with pytest.raises(ConfigError, match="= 400: the training text has only 258 different tokens"):
        train_bpe(["ab"], 400)
    with pytest.raises(ConfigError, match=r"vocab_size = 256: allowed is 257 or more"):
        train_bpe(TEXTS, 256)
