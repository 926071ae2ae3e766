"""Text to token ids and back: byte-level BPE (Sennrich et al. 2016; on bytes, Radford et al. 2019), plain bytes, or
any tokenizer.json of the `tokenizers` library.

Our own is its list of merges and nothing else. Id 0 ends a document, ids 1..256 are the byte values 0..255, and merge m
makes the next free id; plain bytes are the tokenizer without merges. Whatever the tokenizer, no text encodes to the
id that ends a document: the characters '<|endoftext|>' in a document are ordinary text, so it cannot end early.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from mha_jax.config import ConfigError

EOT, EOT_TEXT = 0, "<|endoftext|>"
ENDS = (EOT_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")  # of other people's tokenizers
SMALLEST_VOCABULARY = 257
TRAINING_CHARACTERS = 2**27  # of a larger corpus more would take memory and change next to nothing


def _byte_characters() -> list[str]:
    """The printable character that byte-level BPE writes for each byte value (GPT-2's table)."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


BYTE_CHARACTERS = _byte_characters()


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Byte-level BPE given by its merges; `merges` = () is the byte tokenizer. Decoding an encoding returns
    every valid str exactly (a lone surrogate is not one and raises UnicodeEncodeError)."""

    merges: tuple[tuple[str, str], ...] = ()

    @property
    def eot(self) -> int:
        """The id that follows every document."""
        return EOT

    @property
    def vocab_size(self) -> int:
        """V: the end of a document, 256 bytes, and one token for each merge that makes a new string."""
        return len(self._tokens)

    @functools.cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) of all that encoding depends on: equal fingerprints, equal ids."""
        content = {"format": "byte-level-bpe-1", "eot": EOT, "merges": self.merges}
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @functools.cached_property
    def _tokens(self) -> tuple[str, ...]:
        merged = (left + right for left, right in self.merges)
        return tuple(dict.fromkeys((EOT_TEXT, *BYTE_CHARACTERS, *merged)))

    @functools.cached_property
    def _backend(self) -> tokenizers.Tokenizer:
        # No added tokens: with them the library would turn EOT_TEXT in a document into id 0.
        vocabulary = {token: i for i, token in enumerate(self._tokens)}
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=list(self.merges)))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        return backend

    @functools.cached_property
    def _token_bytes(self) -> list[bytes]:
        value = {character: byte for byte, character in enumerate(BYTE_CHARACTERS)}
        return [EOT_TEXT.encode(), *(bytes(value[c] for c in token) for token in self._tokens[1:])]

    def encode(self, text: str) -> np.ndarray:
        """ids [n] int32 of one text, without an end-of-document token."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text, on all cores."""
        for text in texts:
            text.encode()  # the library's own message for a lone surrogate does not say what is wrong
        return [np.array(e.ids, np.int32) for e in self._backend.encode_batch_fast(list(texts))]

    def decode(self, ids) -> str:
        """The text of ids [n]: id 0 as '<|endoftext|>'; ids outside the vocabulary (a model may have more
        rows than the tokenizer has tokens) and bytes that are not UTF-8 (a cut character) as U+FFFD."""
        known = self._token_bytes
        parts = (known[i] if 0 <= i < len(known) else b"\xff" for i in np.asarray(ids).tolist())
        return b"".join(parts).decode("utf-8", errors="replace")

    def save(self, path):
        """Writes tokenizer.json (whole or not at all), its fingerprint inside."""
        _save(self, path, {"kind": "bpe" if self.merges else "bytes", "merges": self.merges})


@dataclasses.dataclass(frozen=True)
class FileTokenizer:
    """A tokenizer of somebody else's: the JSON that the `tokenizers` library writes, without truncation and padding.

    Decoding an encoding is as exact as that tokenizer is. `eot` is the first of `ENDS` that it has.
    """

    content: str

    @functools.cached_property
    def _backend(self) -> tokenizers.Tokenizer:
        backend = tokenizers.Tokenizer.from_str(self.content)
        backend.encode_special_tokens = True  # their characters in a document are ordinary text
        return backend

    @functools.cached_property
    def eot(self) -> int:
        """The id that follows every document."""
        return next(i for i in map(self._backend.token_to_id, ENDS) if i is not None)

    @functools.cached_property
    def vocab_size(self) -> int:
        """V: one more than the largest id."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values())

    @functools.cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) of all that encoding depends on."""
        return hashlib.sha256(self.content.encode()).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """ids [n] int32 of one text, without an end-of-document token."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text, on all cores. ConfigError for a text that this tokenizer gives its end token."""
        try:
            encoded = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
            found = [np.array(e.ids, np.int32) for e in encoded]
        except Exception as error:  # the library raises nothing narrower: a text with what it has no token for, say
            raise ConfigError(f"the tokenizer cannot encode some document ({error})") from None
        for ids, text in zip(found, texts, strict=True):
            if self.eot in ids:
                raise ConfigError(f"a document that begins {text[:40]!r} holds {self.decode([self.eot])!r}, which this "
                                  "tokenizer makes its end-of-document token: it would end early")  # fmt: skip
        return found

    def decode(self, ids) -> str:
        """The text of ids [n]; ids outside the vocabulary as U+FFFD."""
        known = lambda i: self._backend.id_to_token(i) is not None if i >= 0 else False  # noqa: E731
        runs = itertools.groupby(np.asarray(ids).tolist(), key=known)
        return "".join(self._backend.decode(list(run), skip_special_tokens=False) if ok else "\ufffd" * len(list(run))
                       for ok, run in runs)  # fmt: skip

    def save(self, path):
        """Writes tokenizer.json (whole or not at all), its fingerprint inside."""
        _save(self, path, {"kind": "file", "tokenizer": json.loads(self.content)})


def _save(tokenizer, path, content: dict):
    said = {"vocab_size": tokenizer.vocab_size, "eot": tokenizer.eot, "fingerprint": tokenizer.fingerprint}
    half = pathlib.Path(f"{path}.{os.getpid()}.half")
    half.write_text(json.dumps(content | said, ensure_ascii=False), encoding="utf-8")
    os.replace(half, path)


def load(path) -> Tokenizer | FileTokenizer:
    """Reads what `save` wrote, or a tokenizer.json of the `tokenizers` library.

    ConfigError if it is neither, has no token that ends a document, or does not match the fingerprint inside it.
    """
    try:
        content = json.loads(pathlib.Path(path).expanduser().read_text(encoding="utf-8"))
        if "model" in content:  # the library's own form
            return _of_file(path, content)
        if content.get("kind") == "file":
            tokenizer = _of_file(path, content["tokenizer"])
        else:
            tokenizer = Tokenizer(tuple((left, right) for left, right in content["merges"]))
        stated = content["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: not a tokenizer ({type(error).__name__}: {error})") from None
    if stated != tokenizer.fingerprint:
        raise ConfigError(
            f"{path}: fingerprint {tokenizer.fingerprint[:12]} of the merges is not the stated "
            f"{str(stated)[:12]}: the file was changed after it was written"
        )
    return tokenizer


def _of_file(path, content: dict) -> FileTokenizer:
    plain = content | {"truncation": None, "padding": None}  # documents are encoded whole
    tokenizer = FileTokenizer(json.dumps(plain, sort_keys=True, ensure_ascii=False))
    try:
        backend = tokenizer._backend
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"{path}: the tokenizers library cannot read it ({error})") from None
    if not any(backend.token_to_id(end) is not None for end in ENDS):
        raise ConfigError(f"{path}: it has no token that ends a document; looked for {' '.join(ENDS)}")
    return tokenizer


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A BPE of `vocab_size` ids, the end of a document and the 256 bytes included, trained on the first texts
    that make up TRAINING_CHARACTERS characters: the same texts in the same order give the same tokenizer.

    ConfigError when vocab_size is below 257, or more than the texts can fill.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise ConfigError(f"config.data.vocab_size = {vocab_size}: allowed is {SMALLEST_VOCABULARY} or more")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=BYTE_CHARACTERS, show_progress=False
    )
    backend.train_from_iterator(_first(texts, TRAINING_CHARACTERS), trainer)
    merges = json.loads(backend.to_str())["model"]["merges"]
    tokenizer = Tokenizer(tuple((left, right) for left, right in merges))
    if tokenizer.vocab_size != vocab_size:
        raise ConfigError(
            f"config.data.vocab_size = {vocab_size}: the training text has only "
            f"{tokenizer.vocab_size} different tokens"
        )
    return tokenizer


def _first(texts: Iterable[str], size: int) -> Iterable[str]:
    seen = 0
    for text in texts:
        if seen >= size:
            return
        seen += len(text)
        yield text
