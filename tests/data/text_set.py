"""Prepared datasets of given texts, and what their stream of byte tokens must be."""
import numpy as np
import tensorflow_datasets as tfds

from mha_jax.config import DataConfig
from mha_jax.data import corpus
from mha_jax.data.tokenizer import Tokenizer

T = 8
BYTES = Tokenizer()


class TextSet(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """A dataset of given texts, {split: [bytes, ..]}."""

    name = "text_set"
    VERSION = tfds.core.Version("1.0.0")

    def __init__(self, splits, **kwargs):
        self.splits = splits
        super().__init__(file_format="array_record", **kwargs)

    def _info(self):
        features = tfds.features.FeaturesDict({"text": tfds.features.Text()})
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        return {name: ((i, {"text": t}) for i, t in enumerate(texts)) for name, texts in self.splits.items()}

    def _generate_examples(self):
        raise AssertionError("unused")


def prepared(folder, train, validation):
    builder = TextSet({"train": train, "validation": validation}, data_dir=folder / "tfds")
    return str(corpus.prepare(builder).data_dir)


def config(dataset, cache_dir, **changes):
    defaults = {"task": "text", "tokenizer": "bytes", "length": T, "batch_size": 4, "vocab_size": 257}
    return DataConfig(dataset=dataset, cache_dir=str(cache_dir), **defaults | changes)


TRAIN = [f"train {i:02d} ".encode() + b"abc" * (i % 5) for i in range(40)] + [b"", b"x", b"\xff\xfe", b""]
VALIDATION = [f"valid {i:02d} ".encode() + b"xyz" * (i % 7) for i in range(12)] + [b"", b"y"]


def stream_oracle(dataset, split):
    """Byte values + 1 of the documents in the dataset's own order, each followed by 0."""
    out = []
    for document in tfds.builder_from_directory(dataset).as_data_source(split=split):
        content = document["text"].decode("utf-8", "replace").encode()
        out += [b + 1 for b in content] + [0] * bool(content)
    return out


def tokens_of(batch):
    return np.concatenate([batch["inputs_BT"], batch["targets_BT"][:, -1:]], axis=1)
