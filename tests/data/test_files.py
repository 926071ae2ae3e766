"""Your own files: which documents they hold, what is held out, and what cannot be read."""
import gzip
import hashlib
import json
import os
import shutil
from collections import Counter

import numpy as np
import pytest

from mha_jax.config import ConfigError
from mha_jax.data import files, text
from mha_jax.data.corpus import open_documents
from tests.data.text_set import config

NOWHERE = "/proc/nowhere"  # nothing is remembered there
PLAIN = ["one\r\ntwo\n", "caf\u00e9 \U0001f642", "three"]


def opened(pattern, **options):
    """(train, validation)"""
    return [open_documents(f"files:{pattern}", NOWHERE, split, **options) for split in ("train", "validation")]


def texts(pattern, **options):
    return [list(documents.texts()) for documents in opened(pattern, **options)]


def write_lines(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture(scope="module")
def thousand(tmp_path_factory):
    """1,000 numbered documents in two files."""
    folder = tmp_path_factory.mktemp("thousand")
    for part in range(2):
        write_lines(folder / f"{part}.jsonl", [{"text": f"number {i}", "id": i} for i in range(part, 1000, 2)])
    return folder


def test_text_and_json_lines_packed_or_not(tmp_path):
    (tmp_path / "a.txt").write_bytes(PLAIN[0].encode())
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(PLAIN[1].encode()))
    write_lines(tmp_path / "c.jsonl", [{"body": "x", "text": "y"}, {"body": PLAIN[2]}])
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "d.ndjson.gz").write_bytes(gzip.compress(b'\n{"body": "\\ud83d\\ude42\\ud800 z"}\n'))
    train, validation = texts(f"{tmp_path}/**/*", field="body")
    assert sorted(train + validation) == sorted([*PLAIN, "x", "\U0001f642\ufffd z"])
    assert len(validation) == 1
    train, validation = texts(f"{tmp_path}/*.txt*", validation="1")
    assert sorted(train + validation) == sorted(PLAIN[:2])


def test_fc_20_a_share_and_a_number_are_exact_and_the_splits_never_meet(thousand):
    for validation, count in (("10%", 100), ("90", 90), ("auto", 50), ("0.1%", 1)):
        train, held = texts(f"{thousand}/*", validation=validation)
        assert (len(train), len(held)) == (1000 - count, count), validation
        assert len(set(train) | set(held)) == 1000
    for validation in ("1000", "0.01%", "99.99%"):
        with pytest.raises(ConfigError, match=rf"config.data.validation = '{validation}' of 1000 documents is "):
            texts(f"{thousand}/*", validation=validation)


def test_fc_20_the_split_is_the_texts_own_not_that_of_a_seed_a_name_or_an_order(thousand, tmp_path):
    held = set(texts(f"{thousand}/*")[1])
    everything = [json.loads(line) for path in thousand.iterdir() for line in path.open()]
    write_lines(tmp_path / "shuffled.jsonl", [everything[i] for i in np.random.default_rng(0).permutation(1000)])
    assert set(texts(f"{tmp_path}/*")[1]) == held
    cache = tmp_path / "cache"
    streams = [text.open_text(config(f"files:{thousand}/*", cache), seed=seed) for seed in (0, 1)]
    assert streams[0].validation.fingerprint == streams[1].validation.fingerprint
    train, validation = (set(streams[0].tokenizer.decode(stream.tokens()).split("<|endoftext|>")) - {""}
                         for stream in (streams[0].train, streams[0].validation))  # fmt: skip
    assert validation == held and len(train) == 950 and not train & held


def test_fc_20_a_text_that_comes_twice_is_kept_once_and_said(tmp_path):
    write_lines(tmp_path / "a.jsonl", [{"text": f"{i % 50}"} for i in range(200)] + [{"text": ""}] * 3)
    documents = opened(f"{tmp_path}/*")
    found = Counter(t for split in documents for t in split.texts())
    assert len(found) == 50 and set(found.values()) == {1}
    assert documents[0].left_out == {"empty": 3, "duplicates": 150}
    data = text.open_text(config(f"files:{tmp_path}/*", tmp_path / "cache", length=16, batch_size=2), seed=0)
    assert "document(s) (5% of the different texts, by their hashes), " in data.describe()
    assert data.describe().endswith("vocabulary 257; left out 3 empty; left out 150 duplicates")
    for validation in ("10", "10%"):
        asked = config(f"files:{tmp_path}/*", tmp_path / "cache", length=16, batch_size=2, validation=validation)
        assert f"({validation} of the different texts, by their hashes)," in text.open_text(asked, seed=0).describe()


def test_a_long_text_is_cut_where_lines_end_and_nothing_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LONGEST", 100)
    lines = "".join(f"line {i:03d} " + "w" * (i % 60) + "\n" for i in range(200))
    (tmp_path / "lines.txt").write_text(lines)
    (tmp_path / "none.txt").write_text("x" * 1234)
    pieces = list(files.read([tmp_path / "lines.txt"], "text"))
    assert "".join(pieces) == lines and all(p.endswith("\n") and 50 < len(p) <= 100 for p in pieces[:-1])
    assert [len(p) for p in files.read([tmp_path / "none.txt"], "text")] == [100] * 12 + [34]


def test_fc_12_strange_documents(tmp_path):
    """A few hundred, with empty ones, one byte, bytes that are not UTF-8, and very long ones: each token is there."""
    contents = [f"document {i} ".encode() * (i % 7) for i in range(300)]
    contents += [b"", b"x", b"\xff\xfe", b"caf\xc3", b"\x00", b"long " * 100_000, b"\xff" * 100_000, b"\n" * 3]
    for i, content in enumerate(contents):
        (tmp_path / f"{i:04d}.txt").write_bytes(content)
    data = text.open_text(config(f"files:{tmp_path}/*.txt", tmp_path / "cache", length=64), seed=0)
    pieces = {p for c in contents for p in cut(c.decode("utf-8", "replace")) if p}
    wanted = Counter(p.encode() for p in pieces)
    found = Counter()
    for stream in (data.train, data.validation):
        for first, stop in zip(stream.starts, stream.starts[1:], strict=False):
            found[bytes((stream.tokens(first, stop - 1) - 1).astype(np.uint8))] += 1
    assert found == wanted
    real = data.rows(np.arange(data.num_rows))["weights_BT"].sum()
    assert real == len(data.train) - 1, "every token is predicted once"


def cut(content):
    out = []
    while len(content) > files.LONGEST:
        end = content.rfind("\n", files.LONGEST // 2, files.LONGEST) + 1 or files.LONGEST
        out.append(content[:end])
        content = content[end:]
    return [*out, content]


def test_documents_from_one_on_are_what_a_continued_preparation_reads(thousand):
    train, validation = opened(f"{thousand}/*")
    for documents in (train, validation):
        whole = list(documents.texts())
        for first in (1, 17, len(whole) - 1, len(whole)):
            assert list(documents.texts(first)) == whole[first:]


@pytest.mark.parametrize("name", ["a.json", "a.parquet", "a.JSON.gz", "a.tar"])
def test_files_that_are_neither_text_nor_json_lines_are_not_read_as_text(tmp_path, name):
    (tmp_path / name).write_bytes(bytes(range(256)))
    with pytest.raises(ConfigError, match=rf"{tmp_path}/{name} is neither text nor JSON lines"):
        texts(f"{tmp_path}/*")


def test_a_file_is_read_by_its_name_and_its_tokens_are_kept_by_how_it_is_read(tmp_path):
    write_lines(tmp_path / "A.JSONL", [{"text": f"{i} one"} for i in range(40)])
    assert texts(f"{tmp_path}/*")[0][0].endswith(" one")
    first = opened(f"{tmp_path}/*")[0].identity["sha256"]
    (tmp_path / "A.JSONL").rename(tmp_path / "a.txt")
    assert opened(f"{tmp_path}/*", validation="1")[0].identity["sha256"] != first
    (tmp_path / "a.txt").rename(tmp_path / "a.txt.gz")
    assert opened(f"{tmp_path}/*")[0].identity["sha256"] != first


@pytest.mark.parametrize("when", ["train", "validation"])
def test_fc_20_files_that_change_while_they_are_read_are_not_kept(thousand, tmp_path, monkeypatch, when):
    """Between the look through them and the tokenising, or between the two splits: else validation would be trained
    on, and the cache would say so of the old files for good."""
    path, cache_dir = shutil.copy(thousand / "0.jsonl", tmp_path), tmp_path / "cache"
    lines, asked = (tmp_path / "0.jsonl").read_text().splitlines(True), []
    before, real = os.stat(path), text.tokenise

    def change_first(documents, *args):
        asked.append(documents.identity["split"])
        if asked[-1] == when:
            len(documents)
            (tmp_path / "0.jsonl").write_text("".join(lines[::-1]))
        return real(documents, *args)

    monkeypatch.setattr(text, "tokenise", change_first)
    asked_of = config(f"files:{tmp_path}/*.jsonl", cache_dir)
    with pytest.raises(ConfigError, match="0.jsonl was changed while it was being read; start again when it is whole"):
        text.open_text(asked_of, seed=0)
    monkeypatch.undo()
    (tmp_path / "0.jsonl").write_text("".join(lines))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    data = text.open_text(asked_of, seed=0)
    seen = [set(data.tokenizer.decode(s.tokens()).split("<|endoftext|>")) - {""}
            for s in (data.train, data.validation)]  # fmt: skip
    assert (len(seen[0]), len(seen[1])) == (475, 25) and not seen[0] & seen[1]


def test_a_cache_inside_the_glob_is_not_trained_on(thousand, tmp_path):
    shutil.copy(thousand / "0.jsonl", tmp_path)
    text.open_text(config(f"files:{tmp_path}/**/*", tmp_path / "cache"), seed=0)
    with pytest.raises(ConfigError, match=r"lies in config.data.cache_dir = .*, where this project writes"):
        text.open_text(config(f"files:{tmp_path}/**/*", tmp_path / "cache"), seed=0)


def test_windows_exports_and_a_mark_at_the_start_are_read(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + b'{"text": "one"}\r\n{"text": "two"}\r\n')
    assert sorted(t for split in texts(f"{tmp_path}/*") for t in split) == ["one", "two"]


BAD = {
    "not json\n": r"line 2: not JSON \(",
    '{"txt": "a", "id": 1}\n': r"line 2: no text under 'text' \(config.data.field\); it has 'txt' \(str\), 'id'",
    '{"text": 3}\n': r"line 2: no text under 'text' .*; it has 'text' \(int\)",
    "[" * 10_000 + "\n": r"line 2: not JSON \(",
    "[1]\n": r"line 2: no text under 'text' .*; it is a list",
}


@pytest.mark.parametrize("line", BAD)
def test_a_line_that_is_no_document_is_named(tmp_path, line):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line)
    with pytest.raises(ConfigError, match=rf"config.data.dataset: {tmp_path}/a.jsonl, {BAD[line]}"):
        texts(f"{tmp_path}/*")


def test_what_is_not_there_or_damaged_is_named(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=rf"no file matches {tmp_path}/\*.txt$"):
        texts(f"{tmp_path}/*.txt")
    with pytest.raises(ConfigError, match=rf"it is a folder: its files are files:{tmp_path}/folder/\*\*/\*"):
        texts(tmp_path / "folder")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"text " * 1000)[:-20])
    with pytest.raises(ConfigError, match=f"{tmp_path}/a.txt.gz is damaged"):
        texts(f"{tmp_path}/*.gz")
    (tmp_path / "one.txt").write_text("one")
    with pytest.raises(ConfigError, match=r"1 document\(s\) with text, of which none can be held out"):
        texts(f"{tmp_path}/one.txt")


def test_the_cache_is_found_by_content_and_the_files_are_hashed_once(thousand, tmp_path, monkeypatch):
    copy, cache = tmp_path / "copy", tmp_path / "cache"
    shutil.copytree(thousand, copy)
    first = text.open_text(config(f"files:{thousand}/*", cache), seed=0)
    monkeypatch.setattr(files, "read", lambda *_: pytest.fail("read again"))
    assert text.open_text(config(f"files:{copy}/*", cache), seed=0).train.fingerprint == first.train.fingerprint
    monkeypatch.setattr(hashlib, "file_digest", lambda *_: pytest.fail("hashed again"))
    text.open_text(config(f"files:{copy}/*", cache), seed=0)
    monkeypatch.undo()
    path, before = copy / "0.jsonl", (copy / "0.jsonl").stat()
    path.write_text(path.read_text().replace("number 2", "nombre 2"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    changed = text.open_text(config(f"files:{copy}/*", cache), seed=0)
    assert changed.train.fingerprint != first.train.fingerprint
