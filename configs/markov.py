"""In-context Markov chains (Edelman et al. 2024): three states, a fresh transition matrix in every row.

The loss rests at the in-context unigram line before the model learns to count transitions; the optimum is exact.
Command make run CONFIG=configs/markov.py
Time    47 s on two CPU cores
Expect  evaluation loss 0.912 (Bayes 0.891), ICL score -0.10
        (in-context unigram -0.05); L1H0 prefix matching 0.84, formed at step 209 (200-210)
"""
from mha_jax.config import Config, DataConfig, ModelConfig, OptimizerConfig


def get_config():
    return Config(
        name="markov",
        steps=3000,
        model=ModelConfig(num_layers=2, d_model=16, num_heads=1, num_kv_heads=1),
        data=DataConfig(task="markov", vocab_size=3, length=100, batch_size=64, eval_rows=256),
        optimizer=OptimizerConfig(learning_rate=3e-3, end_learning_rate=3e-4, warmup_steps=100),
    )
