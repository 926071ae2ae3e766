"""Text to token ids and back: byte-level BPE (Sennrich et al. 2016; on bytes, Radford et al. 2019), or plain
bytes.

A tokenizer is its list of merges and nothing else. Id 0 ends a document, ids 1..256 are the byte values
0..255, and merge m makes the next free id; plain bytes are the tokenizer without merges. No text encodes to
id 0: the characters '<|endoftext|>' in a document are ordinary text, so a document cannot end early.
"""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from mha_jax.config import ConfigError

EOT, EOT_TEXT = 0, "<|endoftext|>"
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
        kind = "bpe" if self.merges else "bytes"
        content = {
            "kind": kind,
            "vocab_size": self.vocab_size,
            "eot": EOT,
            "fingerprint": self.fingerprint,
            "merges": self.merges,
        }
        half = pathlib.Path(f"{path}.{os.getpid()}.half")
        half.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        os.replace(half, path)

    @staticmethod
    def load(path) -> "Tokenizer":
        """Reads what `save` wrote. ConfigError if it is unreadable or does not match the fingerprint inside
        it."""
        try:
            content = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
            tokenizer = Tokenizer(tuple((left, right) for left, right in content["merges"]))
            stated = content["fingerprint"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: not a tokenizer of ours ({type(error).__name__}: {error})") from None
        if stated != tokenizer.fingerprint:
            raise ConfigError(
                f"{path}: fingerprint {tokenizer.fingerprint[:12]} of the merges is not the stated "
                f"{str(stated)[:12]}: the file was changed after it was written"
            )
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
