"""The door to documents: the embedded corpus, your own files, and whatever TFDS has prepared.

TFDS reads and writes array_record without TensorFlow, which this module never imports: no 600 MB, and nothing
that takes a GPU's memory before JAX does. Reading a prepared dataset opens no socket.
"""

import contextlib
import dataclasses
import difflib
import io
import os
import pathlib
import re
from collections.abc import Iterator, Sequence

import tensorflow_datasets as tfds
from absl import logging
from tensorflow_datasets.core import constants, naming, read_only_builder, registered

from mha_jax.config import ConfigError
from mha_jax.data import files
from mha_jax.data.cache import content_hash, digest, stamp
from mha_jax.data.stdlib import PythonStdlib
from mha_jax.held_out import AUTO, AUTO_PERCENT, held_out

HASHES = ".hashes"  # in the data folder: what `content_hash` remembers
ENVIRONMENT = "it needs an environment with requirements-prepare.txt"


@dataclasses.dataclass(frozen=True)
class Documents:
    """A random-access sequence of one split of TFDS's: item i is its record i as a dict, with 'text' a str.

    Bytes that are not UTF-8 become U+FFFD (`errors='replace'`). `identity` says what was opened: dataset,
    config, version, split, and the hash of its record files: what is made from documents is kept under it.
    """

    source: Sequence
    text_key: str
    identity: dict
    files: tuple[pathlib.Path, ...]
    stamp: str  # of the files, when opened

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, i: int) -> dict:
        record = self.source[i]
        return record | {"text": record[self.text_key].decode("utf-8", errors="replace")}

    def __iter__(self) -> Iterator[dict]:
        return (self[i] for i in range(len(self)))

    def texts(self, first: int = 0) -> Iterator[str]:
        """The texts from document `first` on."""
        try:
            yield from (self[i]["text"] for i in range(first, len(self)))
        except (RuntimeError, AttributeError, IndexError) as error:  # what array_record raises of a damaged file
            raise ConfigError(f"config.data.dataset: {self.files[0].parent} is damaged ({error})") from None

    @property
    def own_split(self) -> str:
        """What TFDS was asked for, such as 'validation' or 'train[95%:]'."""
        return self.identity["split"]

    @property
    def left_out(self) -> dict[str, int]:
        """How many documents are in no split, by reason: TFDS has left out what it would."""
        return {}


def open_documents(
    dataset: str, data_dir, split: str, validation: str = AUTO, field: str | None = None
) -> Documents | files.FileDocuments:
    """Opens 'train' or 'validation' of a dataset.

    `dataset`: 'stdlib' (prepared on first use), 'files:GLOB', the folder of a prepared dataset, or the TFDS name of one
    ('lm1b', 'imdb_reviews/plain_text:1.0.0'), searched in `data_dir` and then in TFDS's own folder ($TFDS_DATA_DIR,
    else ~/tensorflow_datasets).
    `validation`: a share '10%' or a number '90' of the documents of 'train', which 'train' then leaves out: of a TFDS
    dataset its last records. 'auto' is the dataset's own split 'validation', or 'test', or else 5 %. `field`: where the
    text is; by default 'text', or the only text feature.
    ConfigError, of at most ten lines: unknown or unprepared name, a format without random access, no text there.
    """
    data_dir = pathlib.Path(os.path.expanduser(data_dir))
    if dataset.startswith(files.PREFIX):
        return _open_files(dataset, data_dir, split, validation, field or "text")
    if dataset == "stdlib":
        builder = prepare(PythonStdlib(data_dir=data_dir))
    elif dataset.startswith(("/", ".", "~")) or os.path.exists(_info_file(dataset)):
        builder = _from_folder(dataset)
    else:
        builder = _from_name(dataset, [str(data_dir), constants.get_default_data_dir()])
    chosen = _chosen_split(dataset, builder.info.splits, split, validation)
    try:
        source = builder.as_data_source(split=chosen)
    except NotImplementedError:
        raise ConfigError(
            f"config.data.dataset = {dataset!r}: {builder.data_dir} is in the format "
            f"{builder.info.file_format.value}, which has no random access; to convert it: "
            f"python scripts/prepare_tfds.py {builder.data_dir} --data_dir={data_dir.with_name('array_record')} "
            f"({ENVIRONMENT})"
        ) from None
    whole = builder.info.splits[re.sub(r"\[.*", "", chosen)]
    if missing := [str(file) for file in whole.filepaths if not pathlib.Path(file).exists()]:
        raise ConfigError(
            f"config.data.dataset = {dataset!r}: {len(missing)} of {len(whole.filepaths)} files are missing, "
            f"the first {missing[0]}; delete {builder.data_dir} and prepare it again"
        )
    now = stamp(whole.filepaths)
    identity = {
        "name": builder.name,
        "config": builder.builder_config and builder.builder_config.name,
        "version": str(builder.version),
        "split": chosen,
        "documents": len(source),
        "sha256": content_hash(whole.filepaths, data_dir / HASHES),
    }
    text_key = _text_key(dataset, builder.info.features, field)
    identity |= {"field": text_key} if field else {}
    return Documents(source, text_key, identity, tuple(map(pathlib.Path, whole.filepaths)), now)


def _open_files(dataset: str, data_dir: pathlib.Path, split: str, validation: str, field: str):
    paths = files.find(dataset, data_dir.parent)
    now, kinds = stamp(paths), " ".join(map(files.kind_of, paths))
    identity = {
        "name": "files",
        "split": split,
        "validation": validation,
        "field": field,
        "longest": files.LONGEST,
        "sha256": digest([content_hash(paths, data_dir / HASHES), kinds]),
    }
    return files.FileDocuments(paths, field, validation, identity, now)


def _info_file(folder) -> pathlib.Path:
    """What TFDS writes last: a folder that has it is a prepared dataset."""
    return pathlib.Path(folder) / constants.DATASET_INFO_FILENAME


def prepare(builder: tfds.core.DatasetBuilder) -> tfds.core.DatasetBuilder:
    """The builder, its dataset written if it is not there yet. Two processes may do this at once: TFDS writes
    to a temporary folder and renames it, and whoever comes second takes the first one's. OSError when the
    folder cannot be written."""
    if _info_file(builder.data_dir).exists():
        return builder
    logging.info("preparing %s %s in %s", builder.name, builder.version, builder.data_dir)
    tfds.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # TFDS announces a download that does not take place
            builder.download_and_prepare()
    except OSError:
        if not _info_file(builder.data_dir).exists():
            raise
        builder = tfds.builder_from_directory(builder.data_dir)
    return builder


def _from_folder(dataset: str) -> tfds.core.DatasetBuilder:
    folder = pathlib.Path(os.path.expanduser(dataset))
    if _info_file(folder).exists():
        return tfds.builder_from_directory(folder)
    below = sorted(str(p.parent) for n in ("*", "*/*") for p in folder.glob(str(_info_file(n))))
    hint = f"; below it: {', '.join(below[:3])}" if below else ""
    raise ConfigError(
        f"config.data.dataset = {dataset!r}: no prepared TFDS dataset there (a folder NAME/VERSION with "
        f"{constants.DATASET_INFO_FILENAME}){hint}"
    )


def _from_name(dataset: str, data_dirs: list[str]) -> tfds.core.DatasetBuilder:
    try:
        parsed, options = naming.parse_builder_name_kwargs(dataset)
    except ValueError:
        raise ConfigError(
            f"config.data.dataset = {dataset!r}: allowed is NAME, NAME/CONFIG or NAME/CONFIG:VERSION, "
            "a folder, or stdlib"
        ) from None
    if parsed.namespace or set(options) - {"config", "version"}:
        raise ConfigError(
            f"config.data.dataset = {dataset!r}: allowed is NAME, NAME/CONFIG or NAME/CONFIG:VERSION "
            "of TFDS itself; community datasets would need the network"
        )
    for folder in data_dirs:
        try:
            return read_only_builder.builder_from_files(dataset, data_dir=folder)
        except registered.DatasetNotFoundError:
            continue
        except ImportError as error:  # TFDS asks its code for the default config of a name without one
            raise ConfigError(
                f"config.data.dataset = {dataset!r}: TFDS's code for it does not import "
                f"({str(error).splitlines()[0]}); install that, or give the folder of the prepared dataset"
            ) from None
    raise ConfigError("\n".join(_why_absent(dataset, parsed.name, options.get("version"), data_dirs)))


def _why_absent(dataset: str, name: str, version: str | None, data_dirs: list[str]) -> list[str]:
    """The lines of the message: what is wrong, close names, where we looked, what would prepare it."""
    known = tfds.list_builders(with_community_datasets=False)
    hidden = _hidden_names()
    key = f"config.data.dataset = {dataset!r}"
    searched = f"Searched: {', '.join(data_dirs)}"
    command = f"To prepare it: python scripts/prepare_tfds.py {dataset} --data_dir={data_dirs[0]}"
    if name in known:
        version = version or _version(name)
        note = f"({ENVIRONMENT}, if TFDS asks for TensorFlow; reading never does)"
        return [f"{key}: {name}:{version} is not prepared.", searched, f"{command} {note}"]
    if name in hidden:
        return [
            f"{key}: not prepared, and TFDS hides this dataset where TensorFlow is missing.",
            searched,
            f"{command} ({ENVIRONMENT})",
            "Reading it needs no TensorFlow.",
        ]
    names = {*known, *hidden, "stdlib"}
    close = difflib.get_close_matches(name.lower(), names, 5, 0.6)
    close = close or sorted(n for n in names if n.startswith(name))[:5]
    return [
        f"{key}: not prepared, and TFDS knows no such name.",
        searched,
        f"Close names: {', '.join(close) or 'none'}",
        "Allowed: stdlib, files:GLOB, the name of a TFDS dataset, or the folder of a prepared one",
    ]


def _version(name: str) -> str:
    try:
        builder_class = tfds.builder_cls(name)
    except ImportError:  # its code wants a library that is not here
        return "of an unknown version"
    default = builder_class.default_builder_config.version if builder_class.BUILDER_CONFIGS else None
    return str(default or builder_class.VERSION)


def _hidden_names() -> set[str]:
    """Datasets whose old-style modules TFDS skips without TensorFlow, by the names of their classes: known from the
    text of their files alone."""
    files_of = pathlib.Path(tfds.__file__).parent.rglob("*.py")
    sources = [path.read_text(errors="replace") for path in files_of if not path.stem.endswith("_test")]
    pattern = re.compile(r"^class (\w+)\([\w.]*(?:Builder|WmtTranslate)", re.MULTILINE)
    classes = [name for source in sources for name in pattern.findall(source)]
    return {naming.camelcase_to_snakecase(name) for name in classes} - {"builder"}


def _chosen_split(dataset: str, available, split: str, validation: str) -> str:
    if validation != AUTO and "train" in available:
        documents = available["train"].num_examples
        left = documents - held_out(validation, documents)
        return f"train[:{left}]" if split == "train" else f"train[{left}:]"
    if split in available and split != "train":
        return split
    if "train" not in available:
        raise ConfigError(
            f"config.data.dataset = {dataset!r}: no split 'train'; it has {', '.join(sorted(available))}"
        )
    few = available["train"].num_examples
    cut = f"{100 - AUTO_PERCENT}%" if few >= 20 else few - held_out(AUTO, few)  # a share of few may be none
    if split == "train":
        others = {"validation", "test"} & set(available)
        return "train" if others else f"train[:{cut}]"
    chosen = "test" if "test" in available else f"train[{cut}:]"
    logging.info("%s has no split %r: %r is used in its place", dataset, split, chosen)
    return chosen


def _text_key(dataset: str, features, field: str | None) -> str:
    scalars = {key: feature for key, feature in features.items() if feature.shape == ()}
    texts = [key for key, feature in scalars.items() if isinstance(feature, tfds.features.Text)]
    if field is not None:
        if field not in texts:
            raise ConfigError(f"config.data.field = {field!r}: {dataset!r} has the text features "
                              f"{', '.join(sorted(texts))}")  # fmt: skip
        return field
    if "text" in texts or len(texts) == 1:
        return "text" if "text" in texts else texts[0]
    raise ConfigError(
        f"config.data.dataset = {dataset!r}: no feature 'text', and not one text feature alone; "
        f"set config.data.field to one of {', '.join(sorted(texts)) or 'none, it has no text'}"
    )
