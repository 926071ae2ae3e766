"""Real text: Python's own standard library, 5.5 million tokens of byte-level BPE, no network needed.

Repeated names are what induction heads live on: the phase change shows here too, on repeated spans of the corpus.
Three layers, because in two the second is first needed to look at the token before (trigrams); in three the second
layer's previous-token heads are there for the third to build on.
Command make run CONFIG=configs/stdlib.py
Time    7.3 min on two CPU cores
Expect  evaluation loss 2.350 (smoothed bigram line 3.573), ICL score -0.36
        (in-context unigram -0.90); L2H2 prefix matching 0.41 (chance 0.03), strength 0.5 not reached
"""
from mha_jax.config import Config, DataConfig, ModelConfig, OptimizerConfig, ProbesConfig


def get_config():
    return Config(
        name="stdlib",
        steps=4000,
        model=ModelConfig(num_layers=3, d_model=128, num_heads=4, num_kv_heads=4, positions="shortformer"),
        data=DataConfig(task="text", dataset="stdlib", vocab_size=512, length=128, batch_size=32),
        optimizer=OptimizerConfig(learning_rate=3e-3, end_learning_rate=3e-4, warmup_steps=200),
        probes=ProbesConfig(panel="100", induction_every=50),
    )
