"""Tokens on disk: made once for a corpus and a tokenizer, in shards that are memory-mapped, whole or not at all.

The stream is every document followed by the end-of-document token (EOT), in the order of the documents. A shard holds
whole documents. Shards are written one by one into a folder of another name, which becomes the real one when all are
there: what a killed process leaves is continued by the next, and read by nobody.
"""
import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import os
import pathlib
import platform
import re
import shutil
import sys
from collections.abc import Iterator

import numpy as np
from tqdm import tqdm

from mha_jax.config import ConfigError

FORMAT = 3  # of the files below; part of their fingerprint
SHARD_TOKENS = 2**24  # of a shard, more or less: what is in memory before it is written
CHECKED_TOKENS = 2**28  # of streams up to this the tokens are hashed again when opened: about a second
PARTS = ("tokens", "lengths", "hashes")  # files of a shard
BATCH_CHARACTERS = 2**20  # encoded in one call, on all cores


@dataclasses.dataclass(frozen=True)
class Stream:
    """Tokens of one split. shards: uint16 or uint32 [n], memory-mapped; starts [documents + 1] int64: document d, its
    EOT included, is tokens starts[d] to starts[d + 1]. Documents without a token are left out."""

    shards: tuple[np.ndarray, ...]
    starts: np.ndarray
    hashes: np.ndarray  # uint64 [documents], of their texts
    fingerprint: str  # sha256 of the tokens
    left_out: dict = dataclasses.field(default_factory=dict)  # documents by reason

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, its EOT not counted."""
        return np.diff(self.starts) - 1

    @functools.cached_property
    def _begins(self) -> np.ndarray:
        return np.cumsum([0, *map(len, self.shards)])

    def tokens(self, first: int = 0, stop: int | None = None) -> np.ndarray:
        """Tokens first .. stop - 1, or up to the end."""
        stop = len(self) if stop is None else min(stop, len(self))
        i, parts = int(np.searchsorted(self._begins, first, side="right")) - 1, []
        while first < stop:
            parts.append(self.shards[i][first - self._begins[i] : stop - self._begins[i]])
            first += len(parts[-1])
            i += 1
        return parts[0] if len(parts) == 1 else np.concatenate([*parts, self.shards[0][:0]])

    def read(self, first_R: np.ndarray, size: int, fill: int = 0) -> np.ndarray:
        """int32 [R, size]: tokens first .. first + size - 1 of each row, `fill` beyond the end."""
        rows = np.full((len(first_R), size), fill, np.int32)
        for row, first in zip(rows, first_R.tolist(), strict=True):
            found = self.tokens(first, first + size)
            row[: len(found)] = found
        return rows


def tokenise(documents, tokenizer, cache_dir) -> Stream:
    """The stream of `documents` (`corpus.Documents` or `files.FileDocuments`), from the cache where the same tokenizer
    has cut the same documents before. ConfigError when no document has a token, or the folder was damaged."""
    key = digest({"format": FORMAT, "corpus": documents.identity, "tokenizer": tokenizer.fingerprint})
    folder = pathlib.Path(cache_dir) / "tokens" / key
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(folder.with_name(f".{key}.lock"), "w") as lock:
            _wait_for(lock, folder)  # another process may be at it: then its work is ours
            try:
                if not folder.exists():
                    _write(folder, documents, tokenizer)
            except OSError:
                if not folder.exists():  # else a host that does not see our lock was faster, with the same content
                    raise
    return _open(folder)


def _wait_for(lock, folder: pathlib.Path):
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        print(f"waiting for another process that prepares {folder}", file=sys.stderr, flush=True)
        fcntl.lockf(lock, fcntl.LOCK_EX)


def _open(folder: pathlib.Path) -> Stream:
    try:
        meta = json.loads((folder / "meta.json").read_text())
        shards = tuple(np.load(folder / f"{i:05d}.tokens.npy", mmap_mode="r").view(np.ndarray)
                       for i in range(len(meta["shards"])))  # fmt: skip
        lengths, hashes = (np.concatenate([np.load(folder / f"{i:05d}.{name}.npy") for i in range(len(shards))])
                           for name in ("lengths", "hashes"))  # fmt: skip
        starts = np.concatenate([[0], np.cumsum(lengths[lengths > 0])]).astype(np.int64)
        found = Stream(shards, starts, hashes[lengths > 0], meta["sha256"], meta["left_out"])
        whole = [len(shard) for shard in shards] == meta["shards"] and len(found) == sum(meta["shards"])
        if not whole or len(starts) != meta["documents"] + 1:
            raise ValueError(f"{len(found)} tokens in {len(starts) - 1} documents instead of {meta['tokens']} in "
                             f"{meta['documents']}")  # fmt: skip
        if len(found) <= CHECKED_TOKENS and _sha256(shards) != found.fingerprint:
            raise ValueError("its tokens are not those that its sha256 is of")
    except (FileNotFoundError, ValueError, EOFError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{folder}: damaged ({error}); delete this folder, it will be made again") from None
    return found


def _write(folder: pathlib.Path, documents, tokenizer):
    """Continues what an earlier process left, and gives the folder its name when it is whole."""
    half = folder.with_name(f".{folder.name}.half")
    half.mkdir(exist_ok=True)
    lengths = []
    with contextlib.suppress(FileNotFoundError, ValueError, EOFError):  # from the first that is not whole on
        while True:
            found = [np.load(half / f"{len(lengths):05d}.{name}.npy", mmap_mode="r") for name in PARTS]
            if len(found[0]) != found[1].sum() or len(found[1]) != len(found[2]):
                break
            lengths.append(np.array(found[1]))
    first, name, split = sum(map(len, lengths)), documents.identity["name"], documents.identity["split"]
    if not sys.stderr.isatty():
        print(f"tokenising {name}, {split}: {len(documents):,} documents", file=sys.stderr, flush=True)
    bar = tqdm(total=len(documents), initial=first, desc=f"tokenising {split}", unit=" documents", disable=None,
               leave=False)  # fmt: skip
    with bar:
        for tokens, lengths_D, hashes_D in _shards(documents.texts(first), tokenizer, bar):
            done = half / f"{len(lengths):05d}.tokens.npy"
            _save(half / f"{len(lengths):05d}.lengths.npy", lengths_D)
            _save(half / f"{len(lengths):05d}.hashes.npy", hashes_D)
            _save(done, tokens)  # last: a shard whose tokens are there is whole
            lengths.append(lengths_D)
    counts = np.concatenate([*lengths, np.zeros(0, np.int64)])
    if not counts.any():
        shutil.rmtree(half)
        raise ConfigError(f"config.data.dataset: {name} has no text in split {split!r} ({len(documents)} documents)")
    shards = [np.load(half / f"{i:05d}.tokens.npy", mmap_mode="r") for i in range(len(lengths))]
    meta = {
        "format": FORMAT,
        "corpus": documents.identity,
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "eot": tokenizer.eot,
        "documents": int((counts > 0).sum()),
        "left_out": documents.left_out | {"without_tokens": int((counts == 0).sum())},
        "tokens": int(counts.sum()),
        "shards": [len(shard) for shard in shards],
        "sha256": _sha256(shards),
    }
    (half / "meta.json").write_text(json.dumps(meta, indent=1))
    try:
        check_unchanged(documents.files, documents.stamp)
    except ConfigError:
        shutil.rmtree(half)  # maybe of other text than its name says
        raise
    os.rename(half, folder)


def _shards(texts: Iterator[str], tokenizer, bar) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(tokens, tokens of each document with its EOT or 0, hash of each) of about `SHARD_TOKENS` tokens each."""
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    end, tokens, lengths, hashes, size = np.array([tokenizer.eot], dtype), [], [], [], 0
    for some in _batches(texts):
        for ids in tokenizer.encode_batch(some):
            if len(ids):
                tokens += [ids.astype(dtype), end]
            lengths.append(len(ids) + bool(len(ids)))
            size += lengths[-1]
        hashes += map(text_hash, some)
        bar.update(len(some))
        if size >= SHARD_TOKENS:
            yield np.concatenate(tokens), np.array(lengths, np.int64), np.array(hashes, np.uint64)
            tokens, lengths, hashes, size = [], [], [], 0
    if lengths:
        yield np.concatenate([*tokens, end[:0]]), np.array(lengths, np.int64), np.array(hashes, np.uint64)


def text_hash(text: str) -> int:
    """64 bits of a text, 0 for an empty one: what documents are compared by."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") or 1 if text else 0


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text) + 1
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _save(path: pathlib.Path, array: np.ndarray):
    """The whole file or none, on the disk before it has its name."""
    half = path.with_name(f"{path.name}.{platform.node()}.{os.getpid()}.half")
    with open(half, "wb") as file:
        np.save(file, array)
        file.flush()
        os.fsync(file.fileno())
    os.replace(half, path)


def _sha256(shards) -> str:
    found, step = hashlib.sha256(), 2**22
    for shard in shards:
        for i in range(0, len(shard), step):
            found.update(shard[i : i + step].astype("<u4"))
    return found.hexdigest()


def digest(content) -> str:
    """A key of 32 hex digits for what JSON can hold."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def stamp(files) -> str:
    """A key of paths, sizes and times of change."""
    return digest([(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in map(pathlib.Path, files)])


def check_unchanged(files, before: str):
    """ConfigError when a file is not what it was at the time of a `stamp`."""
    if stamp(files) != before:
        others = f" or one of {len(files) - 1} other files" if len(files) > 1 else ""
        raise ConfigError(f"config.data.dataset: {files[0]}{others} was changed while it was being read; start again "
                          "when it is whole")  # fmt: skip


def content_hash(files, memory: pathlib.Path) -> str:
    """sha256 over the bytes of files, in order: sizes alone would take a corpus that was made again for the one before.

    Remembered in the folder `memory` by path, size and time of change, as git does: a terabyte takes many minutes.
    """
    now = stamp(files)
    note = memory / f"{now}.txt"
    if note.exists() and re.fullmatch("[0-9a-f]{64}", text := note.read_text(errors="replace")):
        return text
    found = hashlib.sha256()
    for file in files:
        with open(file, "rb") as opened:
            found.update(hashlib.file_digest(opened, "sha256").digest())
    check_unchanged(files, now)
    with contextlib.suppress(OSError):  # a folder that may not be written: then it is hashed anew each time
        memory.mkdir(parents=True, exist_ok=True)
        half = note.with_name(f"{note.name}.{os.getpid()}.half")
        half.write_text(found.hexdigest())
        os.replace(half, note)
    return found.hexdigest()
