"""A run on text, from a prepared corpus to the run folder and back: both packings, resumed, measured, refused."""
import json
import random
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_jax.config import CheckpointConfig, Config, ConfigError, DataConfig, ModelConfig, ProbesConfig
from mha_jax.data.tokenizer import load
from mha_jax.model import transformer
from mha_jax.probes import icl, induction
from mha_jax.run import open_run
from mha_jax.training import loop, summary
from mha_jax.training.signals import Stop
from mha_jax.validation import resolve
from tests.data.text_set import prepared
from tests.training import tiny

pytestmark = pytest.mark.usefixtures("quick_module")

STEPS, B, T, VOCAB = 6, 8, 32, 264
PACKINGS = ("concatenated", "packed")


def documents(seed, num, words):
    """`num` texts of `words` words from a small vocabulary."""
    rng = random.Random(seed)
    names = ["".join(rng.choices("abcdefgh", k=4)) for _ in range(30)]
    return [" ".join(rng.choices(names, k=words)).encode() for _ in range(num)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A dataset folder: training documents shorter than a row, validation documents that hold several rows."""
    return prepared(tmp_path_factory.mktemp("corpus"), documents(0, 200, 4), documents(1, 8, 30))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def config(corpus, cache, packing):
    """Device calls are cut at 2, 3, 5, 6; panels and saves at 0, 3, 6."""
    made = resolve(Config(
        name=packing, steps=STEPS, steps_per_call=2,
        model=ModelConfig(num_layers=2, d_model=16, num_heads=4, num_kv_heads=2),
        data=DataConfig(task="text", dataset=corpus, cache_dir=str(cache), packing=packing, vocab_size=VOCAB, length=T,
                        batch_size=B, eval_rows=8),
        probes=ProbesConfig(panel="3", induction_every=3, rows=8, repeats=8, periods=(8, 16)),
        checkpoint=CheckpointConfig(save="3"),
    ))  # fmt: skip
    made.tracking.log_every, made.tracking.wandb = 1, "disabled"
    return made


@pytest.fixture(scope="module", params=[pytest.param(PACKINGS[0], marks=pytest.mark.slow), PACKINGS[1]])
def run(request, quick_module, corpus, cache, tmp_path_factory):
    """(config, folder, summary) of a run that nothing interrupted."""
    cfg, workdir = config(corpus, cache, request.param), tmp_path_factory.mktemp(request.param)
    return cfg, workdir, tiny.train(cfg, workdir)[0]


@pytest.fixture(scope="module")
def opened(run):
    return open_run(run[1])


def test_a_saved_step_measures_what_was_logged_there_bit_for_bit(run, opened):
    for step in (0, 3, 6):
        reading, meta = opened.at(step).reading, opened.at(step).meta
        assert meta["step"] == step
        with np.load(run[1] / "probes" / f"{step:06d}.npz") as logged:
            tiny.assert_same_bits({k: v for k, v in logged.items() if k != "step"}, reading.arrays)


def test_copied_pairs_that_training_made_frequent_stand_apart(run, opened):
    """A pair is frequent when its second token follows the first in a tenth of the cases or more, by NumPy's count."""
    values, text = opened.at(6).reading.values, opened.panel.source.text
    tokens, flat, V = opened.panel.evaluation.tokens_RU, text.train.tokens(), text.tokenizer.vocab_size
    pairs = np.zeros((V, V))
    np.add.at(pairs, (flat[:-1], flat[1:]), 1)
    share = pairs / np.maximum(pairs.sum(1, keepdims=True), 1)
    frequent = share[tokens[:, :-1], tokens[:, 1:]] >= 0.1
    parts = opened.panel.parts
    sure = (share[tokens[:, :-1], tokens[:, 1:]] - 0.1).__abs__() > 0.05  # the line is smoothed
    assert ((parts["copyable_frequent"] == (parts["copyable"] & frequent)) | ~sure).all()
    assert ((parts["copyable_rare"] == (parts["copyable"] & ~frequent)) | ~sure).all()
    n = {name: parts[name].sum() for name in ("copyable", "copyable_frequent", "copyable_rare")}
    assert n["copyable"] == n["copyable_frequent"] + n["copyable_rare"] and min(n.values()) > 0
    mean = sum(n[k] * values[f"eval/{k}"] for k in ("copyable_frequent", "copyable_rare")) / n["copyable"]
    assert mean == pytest.approx(values["eval/copyable"], abs=1e-6)


def test_prefix_matching_is_on_spans_of_the_corpus_and_on_random_blocks_beside_them(run, opened):
    cfg, workdir, _ = run
    with np.load(workdir / "probes" / "000006.npz") as arrays:
        for name in ("induction", "induction_random"):
            assert arrays[f"{name}_PLN"].shape == (2, 2, 4)
            np.testing.assert_array_equal(arrays[f"{name}_periods_P"], (8, 16))
        assert (arrays["induction_PLN"] != arrays["induction_random_PLN"]).all()
    # The spans as the tokenizer of the folder reads them: in one validation document each, and periodic.
    tokenizer = load(workdir / "tokenizer.json")
    validation = [text.decode() for text in documents(1, 8, 30)]
    for period, spans in zip(*opened.panel.repeats["induction"], strict=True):
        for row in spans:
            assert any(tokenizer.decode(row[:period]) in text for text in validation)
            np.testing.assert_array_equal(row, np.resize(row[:period], T))
    with np.load(workdir / "probes" / "000000.npz") as arrays:
        params, _ = opened.params(0)
        for name in ("induction", "induction_random"):
            tokens = opened.panel.repeats[name][1][1]
            with jax.default_matmul_precision("highest"):
                graph = transformer.graphdef(cfg.model)
                pattern = transformer.forward(graph, params, tokens, capture=("pattern",))[1].pattern_LBNTS
            mass = induction.target_mass(pattern, induction.prefix_targets(tokens))
            np.testing.assert_allclose(arrays[f"{name}_PLN"][1], mass, rtol=1e-4)


def test_the_summary_names_the_probe_and_the_packing(run):
    cfg, workdir, out = run
    assert json.loads((workdir / "summary.json").read_text()) == json.loads(json.dumps(out))
    assert out["packing"] == cfg.data.packing and out["induction"]["probe"] == "repeated spans of the corpus"
    assert 0 <= out["input_share"] < 1
    assert out["bayes_loss"] is None and out["icl_bayes"] is None and out["plateau"] == "bigram"
    said = "\n".join(summary.describe(out))
    assert f"rows {cfg.data.packing}" in said and "on repeated spans of the corpus" in said
    assert f"(bigram line {out['limits']['bigram']:.4f})" in said


def test_the_folder_keeps_the_tokenizer_that_made_its_tokens(run, opened):
    tokenizer = load(run[1] / "tokenizer.json")
    assert tokenizer.vocab_size == VOCAB and tokenizer.merges
    assert opened.panel.source.tokenizer == tokenizer
    (meta,) = {opened.checkpoints.meta(step)["data"] for step in (0, 3, 6)}
    assert meta.startswith(tokenizer.fingerprint[:16])


def test_the_first_loss_and_the_tokens_are_those_of_documents_on_their_own(run, opened):
    """Packed: each document of the first batch in a row of its own; concatenated: each row as it is."""
    cfg, workdir, _ = run
    rows = [opened.panel.source.text.rows(np.arange(s * B, (s + 1) * B)) for s in range(STEPS)]
    tokens = np.concatenate([rows[0]["inputs_BT"], rows[0]["targets_BT"][:, -1:]], axis=1)
    pieces = []
    for row in tokens.tolist():
        ends = [i + 1 for i, token in enumerate(row[:-1]) if token == 0] if cfg.data.packing == "packed" else []
        pieces += [row[a:b] for a, b in zip([0, *ends], [*ends, len(row)], strict=True)]
    inputs, targets, weights = (np.zeros((len(pieces), T), kind) for kind in (np.int32, np.int32, np.float32))
    for i, piece in enumerate(pieces):
        inputs[i, : len(piece) - 1], targets[i, : len(piece) - 1] = piece[:-1], piece[1:]
        weights[i, : len(piece) - 1] = 1
    assert (len(pieces) > 2 * B) == (cfg.data.packing == "packed")
    params, _ = opened.params(0)
    logits, _, _ = transformer.forward(transformer.graphdef(cfg.model), params, jnp.array(inputs))
    expected = float((icl.token_loss(logits, targets) * weights).sum() / weights.sum())
    trained = {e["step"]: e for e in tiny.events(workdir) if "train/loss" in e}
    assert sorted(trained) == list(range(STEPS))
    assert trained[0]["train/loss"] == pytest.approx(expected, rel=1e-5)
    counts = [int((r["inputs_BT"] != 0).sum()) if cfg.data.packing == "packed" else B * T for r in rows]
    assert counts[0] == weights.sum()
    assert [trained[s]["tokens"] for s in range(STEPS)] == [sum(counts[:s]) for s in range(STEPS)]


@pytest.mark.parametrize("run", ["packed"], indirect=True)
def test_fc_11_an_interrupted_run_is_the_run_it_would_have_been(run, tmp_path, monkeypatch):
    cfg, whole, out = run
    calls = []
    monkeypatch.setattr(Stop, "asked", lambda self: calls.append(1) or len(calls) == 4)  # at 0, 2, 3 and 5
    with pytest.raises(loop.Stopped):
        tiny.train(cfg, tmp_path)
    monkeypatch.undo()
    assert max(e["step"] for e in tiny.events(tmp_path)) == 4 and not (tmp_path / "summary.json").exists()
    again, said = tiny.train(cfg, tmp_path)
    assert "resumes exactly from step 5" in said
    assert tiny.events(tmp_path) == tiny.events(whole)
    tiny.assert_same_bits(tiny.saved(cfg, tmp_path, STEPS), tiny.saved(cfg, whole, STEPS))
    ours, theirs = tiny.probes(tmp_path), tiny.probes(whole)
    assert ours.keys() == theirs.keys()
    for name in ours:
        tiny.assert_same_bits(ours[name], theirs[name])
    assert (tmp_path / "tokenizer.json").read_bytes() == (whole / "tokenizer.json").read_bytes()
    assert {k: again[k] for k in ("tokens", "final_eval_loss", "icl_score", "induction", "limits")} == {
        k: out[k] for k in ("tokens", "final_eval_loss", "icl_score", "induction", "limits")}  # fmt: skip


@pytest.mark.parametrize("run", ["packed"], indirect=True)
@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_changed_corpus_under_the_same_config_is_refused(run, corpus, tmp_path, monkeypatch, split):
    cfg, workdir, _ = run
    texts = {"train": documents(0, 200, 4), "validation": documents(1, 8, 30)}
    texts[split][3] += b" gggg"
    other = prepared(tmp_path, texts["train"], texts["validation"])
    before = {p: p.read_bytes() for p in workdir.rglob("*") if p.is_file()}
    shutil.move(corpus, tmp_path / "aside")
    try:
        shutil.copytree(other, corpus)
        monkeypatch.setattr(loop.Training, "run", lambda *_: pytest.fail("it went on"))
        with pytest.raises(ConfigError, match=r"is not that of step 6 \(\w+ tokens\): its fingerprint"):
            tiny.train(cfg, workdir)
        with pytest.raises(ConfigError, match=r"is not that of step 3 \(\w+ tokens\): its fingerprint"):
            open_run(workdir).at(3)
    finally:
        shutil.rmtree(corpus)
        shutil.move(tmp_path / "aside", corpus)
    assert before == {p: p.read_bytes() for p in workdir.rglob("*") if p.is_file()}
    assert open_run(workdir).params(3)[1]["step"] == 3  # with its own corpus it opens again
