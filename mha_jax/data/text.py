"""Text as training rows: a stream of tokens (`data.cache`), cut, shuffled and indexed without any state.

Row j holds tokens j T .. j T + T of it (U = T + 1 tokens, stride T), the last row filled up with EOT of weight 0, so
an epoch predicts each token exactly once, but for the first of the stream. Item i of the run is row order(seed, i //
R)[i mod R] of R rows, so what step s sees depends on seed, step and row alone.
"""

import dataclasses
import functools
import os
import pathlib

import grain
import numpy as np
from absl import logging

from mha_jax.config import ConfigError, DataConfig
from mha_jax.data import bigram, optimum
from mha_jax.data.cache import FORMAT, Stream, digest, tokenise
from mha_jax.data.corpus import open_documents
from mha_jax.data.tokenizer import FileTokenizer, Tokenizer, load, train_bpe
from mha_jax.held_out import meaning

# Training tokens that the bigram line is fitted on, at most, in pieces spread evenly over a longer stream.
BIGRAM_TOKENS, BIGRAM_PIECES = 2**25, 64


def make_tokenizer(documents, kind: str, vocab_size: int, cache_dir) -> Tokenizer | FileTokenizer:
    """The byte tokenizer, that of a tokenizer.json, or the BPE of `vocab_size` ids trained on these documents (kept in
    the cache). ConfigError when the file is none."""
    if kind == "bytes":
        return Tokenizer()
    if kind != "bpe":
        return load(kind)
    key = digest({"format": FORMAT, "corpus": documents.identity, "bpe": vocab_size})
    path = pathlib.Path(cache_dir) / "tokenizers" / f"{key}.json"
    if path.exists():
        return load(path)
    tokenizer = train_bpe(documents.texts(), vocab_size)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(path)
    return tokenizer


def annotate(tokens_BU: np.ndarray, eot: int, packing: str) -> dict[str, np.ndarray]:
    """A batch (arrays [B, T]) of rows [B, U] of int32 tokens.

    'concatenated': documents run on; one segment (1), positions 0..T-1, every weight 1.
    'packed': segments count the documents in the row from 1, positions restart in each (a document that began
    before the row starts at 0 where the row does), and the first token of a document is never a target
    (weight 0 where the input is EOT): nothing in its own document predicts it. An EOT belongs to the document
    that it ends.
    """
    inputs_BT, targets_BT = tokens_BU[:, :-1], tokens_BU[:, 1:]
    position_BT = np.broadcast_to(np.arange(inputs_BT.shape[1], dtype=np.int32), inputs_BT.shape)
    starts_BT = np.zeros(inputs_BT.shape, bool)
    weights_BT = np.ones(inputs_BT.shape, np.float32)
    if packing == "packed":
        starts_BT[:, 1:] = inputs_BT[:, :-1] == eot
        weights_BT[inputs_BT == eot] = 0
    start_BT = np.maximum.accumulate(np.where(starts_BT, position_BT, 0), axis=1)
    segments_BT = 1 + np.cumsum(starts_BT, axis=1, dtype=np.int32)
    return {
        "inputs_BT": inputs_BT,
        "targets_BT": targets_BT,
        "weights_BT": weights_BT,
        "positions_BT": position_BT - start_BT,
        "segments_BT": segments_BT,
    }


@dataclasses.dataclass(frozen=True)
class TextData:
    """Training rows, frozen evaluation rows and reference lines of one corpus. Everything is a pure function
    of its arguments and these fields; no iterator, no state."""

    tokenizer: Tokenizer | FileTokenizer
    train: Stream
    validation: Stream
    length: int  # T
    seed: int
    packing: str
    held_out_words: str = ""  # what validation is
    plateau = "bigram"  # which of `lines` is the loss of a model that does not use its context

    @property
    def num_rows(self) -> int:
        """R, rows of one epoch, the last one maybe filled up."""
        return -(-(len(self.train) - 1) // self.length)

    @functools.cached_property
    def _order(self) -> grain.MapDataset:
        # Shuffled before it is repeated: each epoch is a permutation of the rows, and a different one.
        return grain.MapDataset.source(range(self.num_rows)).seed(self.seed).shuffle().repeat()

    def rows(self, items: np.ndarray) -> dict[str, np.ndarray]:
        """The batch (see `annotate`) of these items [B]: item s * B + r is row r of step s."""
        rows_B = np.array([self._order[int(item)] for item in items], np.int64)
        first_B = rows_B * self.length
        batch = self.batch(self.train.read(first_B, self.length + 1, fill=self.tokenizer.eot))
        batch["weights_BT"][first_B[:, None] + np.arange(1, self.length + 1) >= len(self.train)] = 0
        return batch

    def batch(self, tokens_BU: np.ndarray) -> dict[str, np.ndarray]:
        """The batch of any rows [B, U], by this run's packing."""
        return annotate(tokens_BU, self.tokenizer.eot, self.packing)

    @functools.cached_property
    def _seen_D(self) -> np.ndarray:
        """Which validation documents have a text that a training document has too: a dataset's own splits may meet."""
        return np.isin(self.validation.hashes, self.train.hashes)

    def eval_rows(self, num: int, seed: int) -> np.ndarray:
        """tokens [num, U] int32: different rows, each wholly inside a validation document, every possible
        offset equally likely: rows that start where files start would measure licence-then-code, not context.
        ConfigError when the validation documents have fewer than `num` such offsets."""
        return self._inside(self.validation, self.length + 1, num, seed, "config.data.length + 1",
                            "config.data.eval_rows")  # fmt: skip

    def calibration_rows(self, num: int, seed: int) -> np.ndarray:
        """As `eval_rows`, from training documents, so that none of them is an evaluation row."""
        return self._inside(self.train, self.length + 1, num, seed, "config.data.length + 1", "calibration")

    def spans(self, num: int, size: int, seed: int) -> np.ndarray:
        """tokens [num, size] int32: spans from inside one validation document each, to be repeated for prefix
        matching on text as the model knows it. Unlike random blocks, a span may hold a token twice.
        ConfigError as in `eval_rows`."""
        return self._inside(self.validation, size, num, seed, "the repeated span", "config.probes.repeats")

    def _inside(self, stream: Stream, size: int, num: int, seed: int, size_name: str, num_name: str) -> np.ndarray:
        lengths = stream.lengths
        offsets_D = np.maximum(lengths - size + 1, 0)
        if stream is self.validation:
            offsets_D[self._seen_D] = 0
        total = int(offsets_D.sum())
        if total < num:
            kind = "validation" if stream is self.validation else "training"
            raise ConfigError(
                f"too little {kind} text: {num_name} = {num} rows of {size_name} = {size} tokens inside a document; "
                f"the {kind} documents hold {total}, the longest has {lengths.max()} tokens"
            )
        drawn = np.random.default_rng(seed).choice(total, num, replace=False)
        ends_D = np.cumsum(offsets_D)
        document = np.searchsorted(ends_D, drawn, side="right")
        first = stream.starts[document] + drawn - (ends_D - offsets_D)[document]
        return stream.read(first, size)

    @functools.cached_property
    def _bigram(self) -> bigram.Bigram:
        if len(self.train) <= BIGRAM_TOKENS:
            return bigram.fit(self.train.tokens(), self.tokenizer.vocab_size)
        size = BIGRAM_TOKENS // BIGRAM_PIECES
        firsts = np.linspace(0, len(self.train) - size, BIGRAM_PIECES).astype(int)
        sample = np.concatenate([self.train.tokens(first, first + size) for first in firsts])
        return bigram.fit(sample, self.tokenizer.vocab_size)

    def lines(self, tokens_RU: np.ndarray) -> dict[str, np.ndarray]:
        """Losses [R, T] in nats of strategies that bound a model from above, on the same rows: 'uniform' (ln
        V), 'unigram' (counts in the row so far) and 'bigram' (fitted on the training stream). Text has no
        known optimum, so there is no 'bayes'."""
        vocab_size = self.tokenizer.vocab_size
        uniform_RT = np.full(tokens_RU[:, 1:].shape, np.log(vocab_size))
        return {
            "uniform": uniform_RT,
            "unigram": optimum.best_unigram(tokens_RU, vocab_size),
            "bigram": self._bigram.loss(tokens_RU),
        }

    def describe(self) -> str:
        """One line for the start of a run: sizes, packing, what is held out and what is left out."""
        lengths, seen = self.validation.lengths, int(self._seen_D.sum())
        enough = int((lengths[~self._seen_D] > self.length).sum())
        lines = [
            f"text: {len(self.train):,} training tokens in {len(self.train.lengths):,} document(s)",
            f"{self.num_rows:,} {self.packing} rows of {self.length} an epoch",
            f"{len(self.validation):,} validation tokens in {len(lengths):,} document(s) ({self.held_out_words}), "
            f"{enough:,} of them long enough for an evaluation row",
            *([f"{seen:,} of them left out, their texts are in training too"] if seen else []),
            f"vocabulary {self.tokenizer.vocab_size}",
            *(f"left out {n:,} {reason.replace('_', ' ')}" for reason, n in self.train.left_out.items() if n),
        ]
        return "; ".join(lines)


def open_text(data: DataConfig, seed: int, tokenizer: Tokenizer | FileTokenizer | None = None) -> TextData:
    """Prepares what is not in `data.cache_dir` yet (dataset, tokenizer, tokens) and opens it.

    `tokenizer`: the one of an existing run, else `data.tokenizer` and `data.vocab_size` make one. `seed` orders the
    training rows; it moves neither the split nor the tokenizer. ConfigError when the dataset cannot be opened, the
    tokenizer has another vocabulary than `data.vocab_size`, the cache cannot be written, or there are fewer rows than
    one batch.
    """
    cache_dir = pathlib.Path(os.path.expanduser(data.cache_dir))
    try:
        splits = [open_documents(data.dataset, cache_dir / "tfds", name, data.validation, data.field)
                  for name in ("train", "validation")]  # fmt: skip
        if splits[0].stamp != splits[1].stamp and data.dataset.startswith("files:"):
            raise ConfigError(f"config.data.dataset = {data.dataset!r}: the files changed while they were being opened")
        if tokenizer is None:
            tokenizer = make_tokenizer(splits[0], data.tokenizer, data.vocab_size, cache_dir)
        if tokenizer.vocab_size != data.vocab_size:
            raise ConfigError(f"config.data.vocab_size = {data.vocab_size}: the tokenizer has {tokenizer.vocab_size} "
                              f"ids (config.data.tokenizer = {data.tokenizer!r}); allowed is that number")  # fmt: skip
        streams = [tokenise(documents, tokenizer, cache_dir) for documents in splits]
    except OSError as error:
        ours = error.filename is None or pathlib.Path(error.filename).is_relative_to(cache_dir)
        key, value = ("cache_dir", data.cache_dir) if ours else ("dataset", data.dataset)
        raise ConfigError(f"config.data.{key} = {value!r}: cannot be used ({error})") from error
    text = TextData(tokenizer, *streams, length=data.length, seed=seed, packing=data.packing,
                    held_out_words=meaning(data.validation, splits[1].own_split))  # fmt: skip
    if text.num_rows < data.batch_size:
        raise ConfigError(
            f"config.data.dataset = {data.dataset!r} has {len(text.train)} training tokens, "
            f"{text.num_rows} rows of config.data.length = {data.length}: fewer than "
            f"config.data.batch_size = {data.batch_size}"
        )
    logging.info("%s", text.describe())
    return text
