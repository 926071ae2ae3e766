"""Prepare a TFDS dataset, or convert a prepared one, so that mha_jax can read it without TensorFlow.

    python scripts/prepare_tfds.py lm1b                       # download and write it as array_record
    python scripts/prepare_tfds.py wiki40b/en:1.3.0 --data_dir=/data/tfds
    python scripts/prepare_tfds.py /data/tfds/pg19/0.1.1      # prepared as tfrecord: convert it

Some datasets need TensorFlow to be prepared, and some Beam: make an environment of its own for them and
`pip install -r requirements-prepare.txt` there. The script needs nothing else of mha_jax.
"""
import argparse
import difflib
import json
import pathlib
import shutil
import sys

import tensorflow_datasets as tfds
from tensorflow_datasets.core.file_adapters import ADAPTER_FOR_FORMAT, FileFormat

ENVIRONMENT = "pip install -r requirements-prepare.txt, in an environment of its own"
FORMAT = "array_record"  # the one that gives random access


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="NAME, NAME/CONFIG, NAME/CONFIG:VERSION, or the folder of a prepared dataset")
    parser.add_argument("--data_dir", default="~/.cache/mha_jax/tfds", help="where it is written")
    args = parser.parse_args()
    data_dir = pathlib.Path(args.data_dir).expanduser()
    folder = pathlib.Path(args.dataset).expanduser()
    if args.dataset.startswith(("/", ".", "~")) and not (folder / "dataset_info.json").exists():
        sys.exit(f"error: {folder}: no prepared dataset there (a folder NAME/VERSION with dataset_info.json)")
    try:
        done = convert(folder, data_dir) if (folder / "dataset_info.json").exists() else prepare(args.dataset, data_dir)
    except OSError as error:  # requests' errors are of this kind too
        sys.exit(f"error: {args.dataset}: {str(error)[:300]}")
    except tfds.core.DatasetNotFoundError:
        close = difflib.get_close_matches(args.dataset, tfds.list_builders(with_community_datasets=False), 3)
        sys.exit(f"error: {args.dataset}: TFDS knows no such name here; close: {', '.join(close) or 'none'}. Some it "
                 f"knows only with TensorFlow: {ENVIRONMENT}")  # fmt: skip
    except (ValueError, AssertionError) as error:  # a config or a version that there is not
        sys.exit(f"error: {args.dataset}: {str(error).strip().splitlines()[0][:300]}")
    except ImportError as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        sys.exit(f"error: {args.dataset}: {lines[0]}\nTo prepare what needs TensorFlow or Beam: {ENVIRONMENT}")
    print(f"prepared: --config.data.dataset={done}")


def prepare(name: str, data_dir: pathlib.Path) -> pathlib.Path:
    """Downloads and writes a dataset by its name; where it is."""
    builder = tfds.builder(name, data_dir=data_dir, file_format=FORMAT)
    builder.download_and_prepare()
    return pathlib.Path(builder.data_dir)


def convert(folder: pathlib.Path, data_dir: pathlib.Path) -> pathlib.Path:
    """Writes a prepared dataset anew in a format with random access; where it is then.

    Record by record and without Beam: TFDS's own convert_format (4.9.10) writes the records and no dataset_info.json.
    """
    builder = tfds.builder_from_directory(folder)
    before = builder.info.file_format.value
    if before == FORMAT:
        return folder
    config = builder.builder_config.name if builder.builder_config else ""
    out = data_dir / builder.name / config / str(builder.version)
    if out.exists():
        sys.exit(f"error: {out} exists; choose another --data_dir")
    half = out.with_name(f".{out.name}.half")  # a folder under its own name is whole
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir(parents=True)
    read, write = (ADAPTER_FOR_FORMAT[FileFormat(name)] for name in (before, FORMAT))
    for split in builder.info.splits.values():
        for path in map(pathlib.Path, split.filepaths):
            records = enumerate(read.make_tf_data(path).as_numpy_iterator())
            write.write_examples(half / path.name.replace(f".{before}-", f".{FORMAT}-"), records)
            print(f"converted {path.name}")
    for path in folder.glob("*.json"):
        shutil.copy(path, half)
    info = json.loads((folder / "dataset_info.json").read_text())
    (half / "dataset_info.json").write_text(json.dumps(info | {"fileFormat": FORMAT}, indent=2))
    half.rename(out)
    return out


if __name__ == "__main__":
    main()
