"""Your own files as documents, `files:GLOB`: plain text and JSON lines, each .gz or not, read as a stream.

A line of *.jsonl or *.ndjson is a document: an object with its text under one key. Any other file is text: one
document, or, above `LONGEST` characters, several that end where lines end. A text that comes twice is kept once, so
that none is in both splits. The split goes by the hash of the text alone: no seed, no file name
and no order moves a document.
"""
import dataclasses
import functools
import glob
import gzip
import io
import json
import os
import pathlib
import zlib
from collections.abc import Iterator

import numpy as np
from tqdm import tqdm

from mha_jax.config import ConfigError
from mha_jax.data.cache import check_unchanged, text_hash
from mha_jax.held_out import held_out

PREFIX = "files:"
LONGEST = 2**16  # characters: a book would be in one split alone, and tokenised in one go
JSON_LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
NOT_TEXT = (".json", ".parquet", ".arrow", ".npy", ".npz", ".zip", ".tar", ".tgz", ".zst", ".bz2", ".xz", ".pdf")


@dataclasses.dataclass(frozen=True)
class FileDocuments:
    """The documents of one split, in the order of the sorted paths. identity: what they depend on, for the cache."""

    files: tuple[pathlib.Path, ...]
    field: str
    validation: str
    identity: dict
    stamp: str  # of the files, when opened
    own_split = None  # files have none

    def __len__(self) -> int:
        return int(self._mine.sum())

    @property
    def left_out(self) -> dict[str, int]:
        """How many documents are in neither split, by reason."""
        split = self._split
        return {"empty": int((split == EMPTY).sum()), "duplicates": int((split == AGAIN).sum())}

    def texts(self, first: int = 0) -> Iterator[str]:
        """The texts from document `first` on."""
        mine = self._mine
        skip = np.cumsum(mine) <= first  # of mine, those before it
        for i, text in enumerate(read(self.files, self.field)):
            if i >= len(mine):
                check_unchanged(self.files, self.stamp)
            if mine[i] and not skip[i]:
                yield text

    @property
    def _mine(self) -> np.ndarray:
        return self._split == (VALIDATION if self.identity["split"] == "validation" else TRAIN)

    @functools.cached_property
    def _split(self) -> np.ndarray:
        return split_of(_hashes(self.files, self.field, self.identity["sha256"]), self.validation)


TRAIN, VALIDATION, EMPTY, AGAIN = range(4)


def find(dataset: str, cache_dir: pathlib.Path) -> tuple[pathlib.Path, ...]:
    """The files that 'files:GLOB' names, sorted. ConfigError when there are none, or one is no text, or our own."""
    pattern, key = os.path.expanduser(dataset.removeprefix(PREFIX)), f"config.data.dataset = {dataset!r}"
    found = tuple(sorted(path for path in map(pathlib.Path, glob.glob(pattern, recursive=True)) if path.is_file()))
    if not found:
        folder = pathlib.Path(pattern)
        hint = f"; it is a folder: its files are {PREFIX}{pattern}/**/*" if folder.is_dir() else ""
        raise ConfigError(f"{key}: no file matches {folder.absolute()}{hint}")
    for path in found:
        if cache_dir.resolve() in path.resolve().parents:
            raise ConfigError(f"{key}: {path} lies in config.data.cache_dir = {str(cache_dir)!r}, where this project "
                              "writes; name another glob or cache")  # fmt: skip
        if path.name.lower().removesuffix(".gz").endswith(NOT_TEXT):
            raise ConfigError(f"{key}: {path} is neither text nor JSON lines (*.jsonl, one object a line); leave it "
                              "out or convert it")  # fmt: skip
    return found


def is_json_lines(path) -> bool:
    """Whether a file is read as JSON lines, by its name."""
    return str(path).lower().endswith(JSON_LINES)


def kind_of(path) -> str:
    """How a file is read: 't' or 'j' for text or JSON lines, 'z' after it for .gz."""
    return "tj"[is_json_lines(path)] + "z" * str(path).lower().endswith(".gz")


def read(paths, field: str) -> Iterator[str]:
    """The text of every document. Bytes that are not UTF-8 become U+FFFD. ConfigError naming file and line where a
    line is not JSON or has no text under `field`, and for a damaged .gz."""
    for path in paths:
        opened = gzip.open(path, "rb") if kind_of(path).endswith("z") else open(path, "rb")  # noqa: SIM115
        with opened as file:
            try:
                yield from _json_lines(path, file, field) if is_json_lines(path) else _pieces(file)
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise ConfigError(f"config.data.dataset: {path} is damaged ({error})") from None


def _json_lines(path, file, field: str) -> Iterator[str]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8", errors="replace").removeprefix("\ufeff"))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"config.data.dataset: {path}, line {number}: not JSON ({error})") from None
        if not isinstance(record, dict) or not isinstance(record.get(field), str):
            has = f"it is a {type(record).__name__}"
            if isinstance(record, dict):
                some = [f"{key!r} ({type(value).__name__})" for key, value in record.items()]
                has = "it has " + ", ".join(some[:10]) + " ..." * (len(some) > 10)
            raise ConfigError(f"config.data.dataset: {path}, line {number}: no text under {field!r} "
                              f"(config.data.field); {has}")  # fmt: skip
        yield record[field].encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # halves of a pair: \ud800


def _pieces(file) -> Iterator[str]:
    """A text of one file, in pieces of at most `LONGEST` characters that end with a line where one ends."""
    text, file = "", io.TextIOWrapper(file, encoding="utf-8", errors="replace", newline="")
    while True:
        text += file.read(LONGEST + 1 - len(text))
        if len(text) <= LONGEST:
            yield text
            return
        end = text.rfind("\n", LONGEST // 2, LONGEST) + 1 or LONGEST
        yield text[:end]
        text = text[end:]


@functools.lru_cache(maxsize=1)  # both splits ask
def _hashes(paths, field: str, sha256: str) -> np.ndarray:
    """uint64 [documents]: a hash of each text, 0 for an empty one. sha256 of the files is there for the cache alone."""
    all_texts = tqdm(read(paths, field), desc="looking through the files", unit=" documents", disable=None, leave=False)
    return np.fromiter(map(text_hash, all_texts), np.uint64)


def split_of(hash_D: np.ndarray, validation: str) -> np.ndarray:
    """Of each document TRAIN, VALIDATION, EMPTY or AGAIN (an earlier one has the same text): the documents with the
    smallest hashes are held out, as many as `validation` asks for."""
    found = np.full(len(hash_D), AGAIN)
    found[hash_D == 0] = EMPTY
    _, first = np.unique(hash_D, return_index=True)  # ascending by hash
    first = first[hash_D[first] != 0]
    found[first] = TRAIN
    found[first[: held_out(validation, len(first))]] = VALIDATION
    return found
