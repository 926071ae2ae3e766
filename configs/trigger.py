"""Trigger bigrams (Bietti et al. 2023): a global bigram table, and a few tokens whose successor is set by the row.

The bigram part is learnt from the weights and first; the outputs after a trigger's first one only by looking back.
Command make run CONFIG=configs/trigger.py
Time    2.6 min on two CPU cores
Expect  evaluation loss 2.339 (Bayes 2.294), ICL score -4.19
        (in-context unigram -0.75); L1H3 prefix matching 0.06, no head matches random blocks
        parts: bigram 2.71, first outputs 4.24, later outputs 0.05
"""
from mha_jax.config import Config, DataConfig, ModelConfig, OptimizerConfig


def get_config():
    return Config(
        name="trigger",
        steps=1500,
        model=ModelConfig(num_layers=2, d_model=64, num_heads=4, num_kv_heads=4),
        data=DataConfig(task="trigger", vocab_size=64, length=128, batch_size=64, num_triggers=5),
        optimizer=OptimizerConfig(learning_rate=3e-3, end_learning_rate=3e-4, warmup_steps=100),
    )
