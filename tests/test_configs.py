import importlib.util
import pathlib
import re

import jax
import pytest

from mha_jax import config as configs
from mha_jax.model import transformer
from mha_jax.training import state
from mha_jax.validation import resolve

FILES = sorted(pathlib.Path(__file__).parents[1].glob("configs/*.py"))
README = pathlib.Path(__file__).parents[1] / "README.md"


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_config_resolves_and_builds(path):
    module = load(path)
    config = resolve(module.get_config())
    assert config.name == path.stem
    shapes = jax.eval_shape(lambda: state.init_state(config, 0))
    count = sum(x.size for x in jax.tree.leaves(shapes["params"]))
    assert count == transformer.count_params(config.model)
    tokens = jax.ShapeDtypeStruct((2, config.data.length), "int32")
    logits, _, _ = jax.eval_shape(
        lambda p, t: transformer.forward(transformer.graphdef(config.model), p, t), shapes["params"], tokens
    )
    assert logits.shape == (2, config.data.length, config.model.vocab_size)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_config_says_what_it_shows_and_is_in_the_readme(path):
    text = load(path).__doc__
    if path.stem != "default":
        assert re.search(r"^Command .*" + ("make run" if path.stem == "quickstart" else rf"configs/{path.stem}\.py"),
                         text, re.M)  # fmt: skip
        assert re.search(r"^Time    ", text, re.M) and re.search(r"^Expect  ", text, re.M)
        assert "MINUTES" not in text and "EXPECT" not in text
    assert f"`{path.stem}`" in README.read_text()


def test_mha_gqa_and_mqa_differ_in_one_number():
    flats = [configs.flat(load(p).get_config()) for p in FILES if p.stem in ("gqa", "mha", "mqa")]
    differing = {k for k in flats[0] if len({f[k] for f in flats}) > 1}
    assert differing == {"name", "model.num_kv_heads"}
    assert sorted(f["model.num_kv_heads"] for f in flats) == [1, 2, 4]


def test_gpt2_small_has_124_million_parameters():
    path = next(p for p in FILES if p.stem == "gpt2_small")
    assert 124e6 < transformer.count_params(resolve(load(path).get_config()).model) < 125e6
