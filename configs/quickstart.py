"""Induction heads form within a minute, and in-context learning jumps with them.

Shows   a 2-layer attention-only model with 4 query heads over 2 KV heads (GQA) on blocks of distinct random
        tokens, repeated with a period that changes from row to row, so that no positional shortcut works.
Command make run
Time    33 s on two CPU cores
Expect  evaluation loss 1.381 (Bayes 1.278), ICL score -4.20
        (in-context unigram -0.97); L1H1 prefix matching 0.99, formed at step 251 (250-260)
"""
from mha_jax.config import Config, DataConfig, ModelConfig, OptimizerConfig


def get_config():
    return Config(
        name="quickstart",
        steps=1000,
        model=ModelConfig(num_layers=2, d_model=64, num_heads=4, num_kv_heads=2),
        data=DataConfig(task="repeat", vocab_size=64, length=64, batch_size=64, period_min=8, period_max=32),
        optimizer=OptimizerConfig(learning_rate=5e-3, end_learning_rate=5e-4, warmup_steps=100),
    )
