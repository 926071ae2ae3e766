"""The embedded corpus: the running Python's own standard library, as a TFDS builder that needs no TensorFlow."""
import hashlib
import pathlib
import sys
import sysconfig
from collections.abc import Iterator

import tensorflow_datasets as tfds

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
