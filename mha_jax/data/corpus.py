"""Documents: the embedded corpus (the running Python's standard library) and whatever TFDS has prepared.

TFDS reads and writes array_record without TensorFlow, which this module never imports: no 600 MB, and nothing
that takes a GPU's memory before JAX does. Reading a prepared dataset opens no socket.
"""

import contextlib
import dataclasses
import difflib
import hashlib
import io
import pathlib
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence

import tensorflow_datasets as tfds
from absl import logging
from tensorflow_datasets.core import constants, naming, read_only_builder, registered

from mha_jax.config import ConfigError

VALIDATION_PERCENT = 5
# Left out: other people's packages, tests (constructed strings and tables, not code one would write), and
# what the installation generates about its own machine.
_NOT_SOURCE = ["site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"]
_GENERATED = ("_sysconfigdata", "config-", "sitecustomize.py")


def source_paths(root: pathlib.Path) -> list[str]:
    """Sorted relative paths (with /) of the *.py files below `root`, tests and site-packages left out."""
    paths = (path.relative_to(root) for path in pathlib.Path(root).rglob("*.py"))
    return sorted(p.as_posix() for p in paths if not any(_left_out(part) for part in p.parts))


def _left_out(part: str) -> bool:
    return part in _NOT_SOURCE or part.startswith(_GENERATED)


def split_of(path: str) -> str:
    """'validation' for about 5 % of relative paths, else 'train': a hash of the path alone, so that no seed,
    process count or other document moves a document from one split to the other."""
    percent = int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") % 10_000 / 100
    return "validation" if percent < VALIDATION_PERCENT else "train"


class PythonStdlib(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """TFDS builder of Python source files below `root` (default: the running Python's standard library).

    Features: `path` (relative to root) and `text` (the file's bytes). Splits: `split_of(path)`. Files of
    equal content are kept once (the first in path order), so that no text is in both splits. The version is
    Python's, since the corpus differs from one Python to the next.
    """

    # Prepared folders are recognised by name and version: a change of the rules above needs another name.
    name = "python_stdlib"
    VERSION = tfds.core.Version(".".join(map(str, sys.version_info[:3])))

    def __init__(self, *, root=None, **kwargs):
        self.root = pathlib.Path(root or sysconfig.get_path("stdlib"))
        super().__init__(file_format="array_record", **kwargs)

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict({"path": tfds.features.Text(), "text": tfds.features.Text()})
        return tfds.core.DatasetInfo(builder=self, description=type(self).__doc__, features=features)

    def _split_generators(self, dl_manager):
        paths, seen = {"train": [], "validation": []}, set()
        for path in source_paths(self.root):
            content = hashlib.sha256((self.root / path).read_bytes()).digest()
            if content not in seen:
                seen.add(content)
                paths[split_of(path)].append(path)
        for split, some in paths.items():
            if not some:
                raise ConfigError(
                    f"config.data.dataset: {len(seen)} Python source files in {self.root} leave none for "
                    f"{split}: this Python has no standard library in source; name a TFDS dataset"
                )
        return {split: self._generate_examples(some) for split, some in paths.items()}

    def _generate_examples(self, paths) -> Iterator[tuple[str, dict]]:
        for path in paths:
            yield path, {"path": path, "text": (self.root / path).read_bytes()}


@dataclasses.dataclass(frozen=True)
class Documents:
    """A random-access sequence of one split: item i is TFDS's record i as a dict, with 'text' a str.

    Bytes that are not UTF-8 become U+FFFD (`errors='replace'`). `identity` says what was opened: dataset,
    config, version, split, and the hash of its record files: what is made from documents is kept under it.
    """

    source: Sequence
    text_key: str
    identity: dict

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, i: int) -> dict:
        record = self.source[i]
        return record | {"text": record[self.text_key].decode("utf-8", errors="replace")}

    def __iter__(self) -> Iterator[dict]:
        return (self[i] for i in range(len(self)))


def open_documents(dataset: str, data_dir, split: str) -> Documents:
    """Opens 'train' or 'validation' of a dataset.

    `dataset`: 'stdlib' (prepared on first use), the folder of a prepared dataset, or the TFDS name of one
    ('lm1b', 'imdb_reviews/plain_text:1.0.0'), searched in `data_dir` and then in TFDS's own folder
    ($TFDS_DATA_DIR, else ~/tensorflow_datasets). A dataset without a split 'validation' gives 'test' in its
    place, or else the last 5 % of its training documents, which 'train' then leaves out.
    ConfigError, of at most ten lines: unknown or unprepared name, a format without random access, no text
    feature.
    """
    data_dir = pathlib.Path(data_dir).expanduser()
    if dataset == "stdlib":
        builder = prepare(PythonStdlib(data_dir=data_dir))
    elif dataset.startswith(("/", ".", "~")) or _info_file(dataset).exists():
        builder = _from_folder(dataset)
    else:
        builder = _from_name(dataset, [str(data_dir), constants.get_default_data_dir()])
    chosen = _chosen_split(dataset, list(builder.info.splits), split)
    try:
        source = builder.as_data_source(split=chosen)
    except NotImplementedError:
        raise ConfigError(
            f"config.data.dataset = {dataset!r}: {builder.data_dir} is in the format "
            f"{builder.info.file_format.value}, which has no random access; prepare it again with "
            "file_format='array_record'"
        ) from None
    whole = builder.info.splits[re.sub(r"\[.*", "", chosen)]
    if missing := [str(file) for file in whole.filepaths if not pathlib.Path(file).exists()]:
        raise ConfigError(
            f"config.data.dataset = {dataset!r}: {len(missing)} of {len(whole.filepaths)} files are missing, "
            f"the first {missing[0]}; delete {builder.data_dir} and prepare it again"
        )
    identity = {
        "name": builder.name,
        "config": builder.builder_config and builder.builder_config.name,
        "version": str(builder.version),
        "split": chosen,
        "documents": len(source),
        "sha256": _content_hash(whole.filepaths),
    }
    return Documents(source, _text_key(dataset, builder.info.features), identity)


def _content_hash(files) -> str:
    """sha256 over the bytes of the record files, in order. TFDS keeps no checksum of what it prepared, and sizes
    alone would take a corpus that was prepared again for the one before. About a second for a gigabyte."""
    found = hashlib.sha256()
    for file in files:
        with open(file, "rb") as opened:
            found.update(hashlib.file_digest(opened, "sha256").digest())
    return found.hexdigest()


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
    folder = pathlib.Path(dataset).expanduser()
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
    options = f"{dataset!r}, data_dir={data_dirs[0]!r}, file_format='array_record'"
    recipe = f"tfds.builder({options}).download_and_prepare()"
    command = f'python -c "import tensorflow_datasets as tfds; {recipe}"'
    searched = f"Searched: {', '.join(data_dirs)}"
    if name in known:
        version = version or _version(name)
        note = "(Some datasets need TensorFlow to be prepared; none needs it to be read.)"
        return [f"{key}: {name}:{version} is not prepared.", searched, f"To prepare it: {command}", note]
    if name in hidden:
        return [
            f"{key}: not prepared, and TFDS hides this dataset where TensorFlow is missing.",
            searched,
            f"To prepare it, where TensorFlow is installed: {command}",
            "Reading it needs no TensorFlow: give the folder it was prepared in, NAME/VERSION.",
        ]
    close = difflib.get_close_matches(name.lower(), {*known, *hidden, "stdlib"}, 5, 0.6)
    return [
        f"{key}: not prepared, and TFDS knows no such name.",
        searched,
        f"Close names: {', '.join(close) or 'none'}",
        "Allowed: stdlib, the name of a TFDS dataset, or the folder of a prepared one",
    ]


def _version(name: str) -> str:
    builder_class = tfds.builder_cls(name)
    default = builder_class.default_builder_config.version if builder_class.BUILDER_CONFIGS else None
    return str(default or builder_class.VERSION)


def _hidden_names() -> set[str]:
    """Datasets whose old-style modules TFDS skips without TensorFlow: we know them by their files alone."""
    package, rooms = pathlib.Path(tfds.__file__).parent, ("text", "translate", "summarization")
    names = [path.stem for room in rooms for path in package.glob(f"{room}/*.py")]
    return {name for name in names if not name.endswith(("_test", "_utils", "__init__"))}


def _chosen_split(dataset: str, available: list[str], split: str) -> str:
    if split in available and split != "train":
        return split
    if "train" not in available:
        raise ConfigError(
            f"config.data.dataset = {dataset!r}: no split 'train'; it has {', '.join(sorted(available))}"
        )
    if split == "train":
        held_out = {"validation", "test"} & set(available)
        return "train" if held_out else f"train[:{100 - VALIDATION_PERCENT}%]"
    chosen = "test" if "test" in available else f"train[{100 - VALIDATION_PERCENT}%:]"
    logging.info("%s has no split %r: %r is used in its place", dataset, split, chosen)
    return chosen


def _text_key(dataset: str, features) -> str:
    scalars = {key: feature for key, feature in features.items() if feature.shape == ()}
    texts = [key for key, feature in scalars.items() if isinstance(feature, tfds.features.Text)]
    if "text" in texts or len(texts) == 1:
        return "text" if "text" in texts else texts[0]
    raise ConfigError(
        f"config.data.dataset = {dataset!r}: no feature 'text', and not one text feature alone; "
        f"it has {', '.join(sorted(features))}"
    )
