"""Documents: which files, which split, what is said when a dataset is not there."""

import hashlib
import json
import os
import pathlib
import subprocess
import sys

import pytest
import tensorflow_datasets as tfds

from mha_jax.config import ConfigError
from mha_jax.data import corpus, stdlib


def write_tree(root, files):
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


@pytest.fixture(scope="module")
def thousand(tmp_path_factory):
    """The folder of a prepared dataset of 1,000 numbered documents, and one of them twice."""
    tmp = tmp_path_factory.mktemp("thousand")
    files = {f"d{i % 7}/doc_{i:04d}.py": f"number = {i:04d}\n" for i in range(1000)}
    root = write_tree(tmp / "root", files | {"zz_copy_of_0000.py": "number = 0000\n"})
    builder = corpus.prepare(stdlib.PythonStdlib(root=root, data_dir=tmp / "tfds"))
    return pathlib.Path(builder.data_dir)


class Manual(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """A dataset of given splits {split: [record, ..]}, all features text."""

    name = "manual"
    VERSION = tfds.core.Version("1.0.0")

    def __init__(self, splits, **kwargs):
        self.splits = splits
        super().__init__(file_format="array_record", **kwargs)

    def _info(self):
        keys = next(iter(self.splits.values()))[0]
        features = tfds.features.FeaturesDict({key: tfds.features.Text() for key in keys})
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        return {split: enumerate(records) for split, records in self.splits.items()}

    def _generate_examples(self):
        raise AssertionError("unused")


def prepared(tmp_path, splits) -> str:
    return str(corpus.prepare(Manual(splits, data_dir=tmp_path)).data_dir)


def texts(dataset, split, data_dir="/proc/nowhere"):
    return [document["text"] for document in corpus.open_documents(str(dataset), data_dir, split)]


def test_which_files_are_documents(tmp_path):
    kept = {"ast.py": "a", "json/decoder.py": "b", "doctest.py": "c", "test_support.py": "d"}
    left_out = [
        "site-packages/pip/x.py",
        "test/test_ast.py",
        "ctypes/test/a.py",
        "lib2to3/tests/a.py",
        "idlelib/idle_test/a.py",
        "config-3.11-x86_64-linux-gnu/python-config.py",
        "_sysconfigdata__linux_x86_64-linux-gnu.py",
        "__pycache__/a.py",
        "LICENSE.txt",
        "json/decoder.pyc",
        "sitecustomize.py",
        "dist-packages/a.py",
    ]
    write_tree(tmp_path, kept | dict.fromkeys(left_out, "x"))
    assert stdlib.source_paths(tmp_path) == sorted(kept)


def test_stdlib_leaves_out_tests_and_packages_and_splits_disjointly():
    root = stdlib.PythonStdlib(data_dir="/proc/nowhere").root
    paths = stdlib.source_paths(root)
    assert len(paths) > 400
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= set(paths)
    parts = {part for path in paths for part in path.split("/")}
    assert not parts & {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    assert not any(part.startswith("_sysconfigdata") for part in parts)
    validation = {path for path in paths if stdlib.split_of(path) == "validation"}
    train = {path for path in paths if stdlib.split_of(path) == "train"}
    assert not validation & train and validation | train == set(paths)
    assert 0.03 < len(validation) / len(paths) < 0.07


def test_version_of_the_stdlib_is_pythons():
    assert str(stdlib.PythonStdlib(data_dir="/proc/nowhere").version) == "{}.{}.{}".format(*sys.version_info[:3])


def test_fc_20_split_is_a_hash_of_the_path_alone(thousand):
    train, validation = (corpus.open_documents(str(thousand), "/proc/nowhere", s) for s in ("train", "validation"))
    for split, documents in {"train": train, "validation": validation}.items():
        for document in documents:
            share = int(hashlib.sha256(document["path"]).hexdigest()[:16], 16) % 10_000
            assert ("validation" if share < 500 else "train") == split
    numbers = [set(texts(thousand, split)) for split in ("train", "validation")]
    assert not numbers[0] & numbers[1]
    assert len(numbers[0] | numbers[1]) == 1000 == len(train) + len(validation)  # the copy is in neither
    assert 30 <= len(validation) <= 70


def test_fc_20_equal_texts_do_not_meet_across_splits(tmp_path):
    # Without the rule these 200 equal files would fall on both sides.
    same = {f"{i}.py": "same\n" for i in range(200)}
    root = write_tree(tmp_path / "root", same | {f"other_{i}.py": f"{i}\n" for i in range(200)})
    folder = corpus.prepare(stdlib.PythonStdlib(root=root, data_dir=tmp_path / "tfds")).data_dir
    train, validation = texts(folder, "train"), texts(folder, "validation")
    assert len(train) + len(validation) == 201
    assert not set(train) & set(validation)


def test_fc_20_dataset_with_train_alone_holds_out_its_last_five_percent(tmp_path):
    folder = prepared(tmp_path, {"train": [{"text": f"{i}"} for i in range(1000)]})
    train, validation = texts(folder, "train"), texts(folder, "validation")
    assert (len(train), len(validation)) == (950, 50)
    assert not set(train) & set(validation) and len(set(train + validation)) == 1000


def test_fc_20_a_share_and_a_number_of_documents_are_what_they_say(tmp_path):
    """Held out of the training split, which a set that has a split of its own keeps apart from it."""
    folder = prepared(tmp_path, {"train": [{"text": f"{i}"} for i in range(1000)], "validation": [{"text": "own"}]})
    for validation, count in (("auto", 1), ("10%", 100), ("90", 90), ("0.1%", 1), ("99.9%", 999), ("1", 1)):
        splits = [corpus.open_documents(folder, "/proc/nowhere", split, validation)
                  for split in ("train", "validation")]  # fmt: skip
        train, held = ([document["text"] for document in split] for split in splits)
        assert len(held) == count and not set(train) & set(held), validation
        assert len(train) == (1000 if validation == "auto" else 1000 - count)
        assert len({str(split.identity) for split in splits}) == 2
    for validation in ("1000", "0.01%", "99.99%"):
        with pytest.raises(ConfigError, match=rf"config.data.validation = '{validation}' of 1000 documents is "):
            corpus.open_documents(folder, "/proc/nowhere", "train", validation)


@pytest.mark.parametrize("n", [2, 3, 9, 10, 11, 19, 20, 30])
def test_fc_20_of_few_documents_one_is_held_out(tmp_path, n):
    folder = prepared(tmp_path, {"train": [{"text": f"{i}"} for i in range(n)]})
    train, held = texts(folder, "train"), texts(folder, "validation")
    assert len(train) + len(held) == n and len(held) >= 1 and not set(train) & set(held)


def test_test_split_stands_in_for_validation(tmp_path):
    folder = prepared(tmp_path, {"train": [{"text": "a"}] * 40, "test": [{"text": "b"}] * 3})
    assert (texts(folder, "train"), texts(folder, "validation")) == (["a"] * 40, ["b"] * 3)


def test_fc_12_strange_documents_are_read(tmp_path):
    split = [{"text": b""}, {"text": b"x"}, {"text": b"\xff\xfe"}, {"text": b"caf\xc3"}]
    folder = prepared(tmp_path, {"train": split, "validation": split})
    assert sorted(texts(folder, "train")) == sorted(["", "x", "\ufffd\ufffd", "caf\ufffd"])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lm1bb", ["'lm1bb'", "Close names: ", "lm1b", "stdlib"]),
        ("stdlb", ["'stdlb'", "Close names: stdlib"]),
        ("lm1b", ["lm1b:1.1.0 is not prepared", "prepare_tfds.py lm1b --data_dir=", "requirements-prepare.txt"]),
        ("imdb_reviews/plain_text:1.0.0", ["imdb_reviews:1.0.0 is not prepared",
                                            "python scripts/prepare_tfds.py imdb_reviews/plain_text:1.0.0 "]),
        ("gsm8k", ["'gsm8k'", "hides this dataset where TensorFlow is missing"]),
        ("wmt19_translate", ["'wmt19_translate'", "hides this dataset where TensorFlow is missing"]),
        ("imdb", ["'imdb'", "TFDS knows no such name", "imdb_reviews"]),
        ("dices/350", ["dices:of an unknown version is not prepared"]),
        ("x" * 300, ["TFDS knows no such name"]),
        ("c4", ["'c4'", "hides this dataset where TensorFlow is missing", "scripts/prepare_tfds.py c4 --data_dir="]),
    ],
)
def test_fc_19_absent_dataset_is_explained_in_ten_lines(tmp_path, monkeypatch, name, expected):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "own"))
    with pytest.raises(ConfigError) as error:
        corpus.open_documents(name, tmp_path / "given", "train")
    message = str(error.value)
    assert len(message.splitlines()) <= 10
    for part in [*expected, f"Searched: {tmp_path}/given, {tmp_path}/own", "config.data.dataset"]:
        assert part in message


@pytest.mark.parametrize("name", ["huggingface:glue", "two words", "", "lm1b/x=1", "dices"])
def test_fc_19_unusable_names_are_refused_in_one_line(tmp_path, name):
    with pytest.raises(ConfigError, match=r"config\.data\.dataset = ") as error:
        corpus.open_documents(name, tmp_path, "train")
    assert name == "dices" or len(str(error.value).splitlines()) == 1


def test_fc_19_folder_without_a_dataset_names_the_ones_below(thousand):
    with pytest.raises(ConfigError, match=f"below it: {thousand}"):
        corpus.open_documents(str(thousand.parent.parent), "/proc/nowhere", "train")


def test_prepared_dataset_opens_by_name_in_either_folder(thousand, monkeypatch):
    data_dir = thousand.parent.parent
    by_folder = texts(thousand, "train")
    assert texts("python_stdlib", "train", data_dir) == by_folder
    monkeypatch.setenv("TFDS_DATA_DIR", str(data_dir))
    version = "{}.{}.{}".format(*sys.version_info[:3])
    assert texts(f"python_stdlib:{version}", "train") == by_folder


OFFLINE = """
import sys
opened = []
sys.addaudithook(lambda event, args: event.startswith("socket.") and opened.append(event))
from mha_jax.config import ConfigError, DataConfig
from mha_jax.data import corpus, stdlib, text
folder, root, cache, dolly = sys.argv[1:]
stdlib.PythonStdlib.__init__.__kwdefaults__["root"] = root

import tensorflow_datasets as tfds  # what the world has: its own code for a dataset, given the file it would fetch
tfds.download.DownloadManager.download = lambda self, urls: dict.fromkeys(urls, dolly)
tfds.builder("databricks_dolly", data_dir=cache + "/tfds", file_format="array_record").download_and_prepare()

for dataset, field in ((folder, None), ("stdlib", None), (f"files:{root}/**/*.py", None),
                       ("databricks_dolly", "response"), ("databricks_dolly:1.0.0", "instruction")):
    data = DataConfig(task="text", dataset=dataset, field=field, cache_dir=cache, length=8, batch_size=4,
                      vocab_size=260)
    found = text.open_text(data, 0)
    assert len(found.eval_rows(4, 0)) == 4
    if field:
        seen = found.tokenizer.decode(found.train.tokens())
        assert seen.count(f"the {field} of") > 90 and "of 7 " in seen + found.tokenizer.decode(
            found.validation.tokens()), seen[:200]
for name in ("lm1b", "lm1bb"):
    try:
        corpus.open_documents(name, cache, "train")
    except ConfigError:
        pass
assert not opened, opened
assert "tensorflow" not in sys.modules, "TensorFlow was imported"
"""


def test_fc_19_no_socket_and_no_tensorflow(thousand, tmp_path):
    # A stub stands for an installed TensorFlow: without one the import would fail and prove nothing.
    write_tree(tmp_path, {"stub/tensorflow/__init__.py": "__version__ = '2.99.0'\n"})
    root = pathlib.Path(corpus.__file__).parents[2]
    env = os.environ | {"PYTHONPATH": f"{tmp_path}/stub:{root}", "TFDS_DATA_DIR": str(tmp_path / "own")}
    source = thousand.parents[2] / "root"
    keys = ("instruction", "context", "response", "category")
    lines = [json.dumps({key: f"the {key} of {i} in full" for key in keys}) for i in range(120)]
    write_tree(tmp_path, {"dolly.jsonl": "\n".join(lines)})
    command = [sys.executable, "-c", OFFLINE, str(thousand), str(source), str(tmp_path / "cache"),
               str(tmp_path / "dolly.jsonl")]  # fmt: skip
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_missing_file_and_other_formats_are_named(tmp_path):
    folder = pathlib.Path(prepared(tmp_path, {"train": [{"text": "a"}] * 40}))
    info = json.loads((folder / "dataset_info.json").read_text())
    (folder / "dataset_info.json").write_text(json.dumps(info | {"fileFormat": "tfrecord"}))
    with pytest.raises(ConfigError, match=rf"tfrecord, which has no random access; to convert it: "
                       rf"python scripts/prepare_tfds.py {folder} --data_dir=/proc/array_record \(it needs an environ"):
        corpus.open_documents(str(folder), "/proc/nowhere", "train")
    (folder / "dataset_info.json").write_text(json.dumps(info))
    next(folder.glob("*array_record*")).unlink()
    with pytest.raises(ConfigError, match=r"1 of 1 files are missing, the first .*manual-train"):
        corpus.open_documents(str(folder), "/proc/nowhere", "train")


def test_text_is_the_feature_text_or_the_only_one(tmp_path):
    one = prepared(tmp_path / "one", {"train": [{"book": "a"}] * 40})
    assert texts(one, "train")[0] == "a"
    two = prepared(tmp_path / "two", {"train": [{"question": "a", "answer": "b"}] * 40})
    with pytest.raises(ConfigError, match=r"no feature 'text'.* set config.data.field to one of answer, question"):
        corpus.open_documents(two, "/proc/nowhere", "train")
    assert corpus.open_documents(two, "/proc/nowhere", "train", field="answer")[0]["text"] == "b"
    with pytest.raises(ConfigError, match=r"config.data.field = 'anser': .* has the text features answer, question"):
        corpus.open_documents(two, "/proc/nowhere", "train", field="anser")


def test_two_processes_preparing_at_once_both_succeed(tmp_path):
    root = write_tree(tmp_path / "root", {f"{i}.py": f"{i}\n" for i in range(200)})

    class Overtaken(stdlib.PythonStdlib, skip_registration=True):
        name = "python_stdlib"

        def _generate_examples(self, paths):
            corpus.prepare(stdlib.PythonStdlib(root=root, data_dir=tmp_path / "tfds"))  # the faster process
            return super()._generate_examples(paths)

    builder = corpus.prepare(Overtaken(root=root, data_dir=tmp_path / "tfds"))
    assert len(texts(builder.data_dir, "train")) + len(texts(builder.data_dir, "validation")) == 200
    assert len(list((tmp_path / "tfds" / "python_stdlib").iterdir())) == 1  # nothing half-written is left


def test_python_without_sources_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=f"0 Python source files in {tmp_path}"):
        corpus.prepare(stdlib.PythonStdlib(root=tmp_path, data_dir=tmp_path / "tfds"))
