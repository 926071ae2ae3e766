"""Tokenizers: exact round trips, hand-worked merges, fingerprints."""

import itertools
import json
import random

import numpy as np
import pytest

from mha_jax.config import ConfigError
from mha_jax.data.tokenizer import Tokenizer, load, train_bpe

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
    loaded = load(path)
    assert loaded == tokenizer and loaded.fingerprint == json.loads(path.read_text())["fingerprint"]
    np.testing.assert_array_equal(loaded.encode(TEXTS[0]), tokenizer.encode(TEXTS[0]))


def test_changed_file_is_refused_by_name(tmp_path):
    path = tmp_path / "tokenizer.json"
    BPE.save(path)
    content = json.loads(path.read_text())
    content["merges"][0], content["merges"][1] = content["merges"][1], content["merges"][0]
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=rf"{path}: fingerprint .* not the stated {BPE.fingerprint[:12]}"):
        load(path)


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"merges": [["a"]], "fingerprint": ""}'])
def test_other_files_are_refused_by_name(content, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=f"{path}: not a tokenizer"):
        load(path)
    with pytest.raises(ConfigError, match="FileNotFoundError"):
        load(tmp_path / "absent.json")


def test_vocabulary_the_text_cannot_fill_names_both_sizes():
    with pytest.raises(ConfigError, match="= 400: the training text has only 258 different tokens"):
        train_bpe(["ab"], 400)
    with pytest.raises(ConfigError, match=r"vocab_size = 256: allowed is 257 or more"):
        train_bpe(TEXTS, 256)


# ------------------------------------------------------------------------------------------- tokenizers of other people


def made_elsewhere(kind, ends="<|endoftext|>"):
    """What the library's own trainers make, with an end token, truncation and padding as on a hub."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if kind == "bpe":
        made = Library(models.BPE())
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[ends], show_progress=False,
                                      initial_alphabet=pre_tokenizers.ByteLevel.alphabet())  # fmt: skip
    else:
        made = Library(models.WordLevel(unk_token="[UNK]"))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        trainer = trainers.WordLevelTrainer(special_tokens=["[UNK]", ends], show_progress=False)
    made.train_from_iterator(TEXTS, trainer)
    made.enable_truncation(3)
    made.enable_padding(length=8)
    return made


@pytest.fixture
def foreign(tmp_path):
    made_elsewhere("bpe").save(str(tmp_path / "theirs.json"))
    return load(tmp_path / "theirs.json")


def test_a_tokenizer_json_encodes_as_its_library_does_without_cutting_or_filling(foreign):
    made = made_elsewhere("bpe")
    made.no_truncation()
    made.no_padding()
    for text in (*TEXTS, "", "query", random_text(3)):
        assert foreign.encode(text).tolist() == made.encode(text, add_special_tokens=False).ids
        assert foreign.decode(foreign.encode(text)) == text
    assert (foreign.vocab_size, foreign.eot) == (made.get_vocab_size(), made.token_to_id("<|endoftext|>"))
    assert foreign.decode([foreign.eot, 10**6, -1]) == "<|endoftext|>\ufffd\ufffd"


def test_fc_12_the_end_token_in_a_document_is_text_in_any_tokenizer(foreign):
    ids = foreign.encode("a<|endoftext|>b")
    assert foreign.eot not in ids and foreign.decode(ids) == "a<|endoftext|>b"


def test_a_document_that_would_end_early_is_an_error(tmp_path):
    """A tokenizer in which the end token is a word like any other."""
    made = made_elsewhere("words", ends="[SEP]")
    content = json.loads(made.to_str())
    content["added_tokens"], content["pre_tokenizer"] = [], {"type": "WhitespaceSplit"}
    (tmp_path / "t.json").write_text(json.dumps(content))
    tokenizer = load(tmp_path / "t.json")
    with pytest.raises(ConfigError, match=r"begins 'query \[SEP\] key' holds '\[SEP\]'.*it would end early"):
        tokenizer.encode("query [SEP] key")


def test_a_tokenizer_json_goes_into_the_run_folder_and_comes_back(foreign, tmp_path):
    foreign.save(tmp_path / "tokenizer.json")
    again = load(tmp_path / "tokenizer.json")
    assert again == foreign and again.fingerprint == foreign.fingerprint not in (BPE.fingerprint, BYTES.fingerprint)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    assert (content["kind"], content["vocab_size"], content["eot"]) == ("file", foreign.vocab_size, foreign.eot)
    content["tokenizer"]["model"]["merges"] = content["tokenizer"]["model"]["merges"][::-1]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="not the stated .*: the file was changed after it was written"):
        load(tmp_path / "tokenizer.json")


def test_a_tokenizer_json_that_cannot_be_used_is_named(tmp_path):
    made_elsewhere("words", ends="[END]").save(str(tmp_path / "none.json"))
    with pytest.raises(ConfigError, match=r"none.json: it has no token that ends a document; looked for <\|endoftext"):
        load(tmp_path / "none.json")
    (tmp_path / "odd.json").write_text('{"model": {"type": "Unheard"}}')
    with pytest.raises(ConfigError, match="odd.json: the tokenizers library cannot read it"):
        load(tmp_path / "odd.json")
