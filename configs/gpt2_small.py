"""GPT-2 small (124M parameters) on any prepared text, for one GPU or a TPU slice; not for two CPU cores.

Command python train.py --config=configs/gpt2_small.py --workdir=runs/gpt2_small --config.data.dataset=NAME
Time    not measured
Expect  not measured; on the standard library alone (the default here) it overfits within an epoch or two
"""
from mha_jax.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ProbesConfig,
)


def get_config():
    return Config(
        name="gpt2_small",
        steps=20_000,
        model=ModelConfig(num_layers=12, d_model=768, num_heads=12, num_kv_heads=12, positions="learned", mlp="gelu",
                          bias=True, tied=True, init="gpt2", vocab_size=50_304, dtype="bfloat16"),
        data=DataConfig(task="text", dataset="stdlib", vocab_size=8192, length=1024, batch_size=64, eval_rows=16),
        optimizer=OptimizerConfig(learning_rate=6e-4, end_learning_rate=6e-5, warmup_steps=1000, weight_decay=0.1,
                                  accumulation=4),
        probes=ProbesConfig(panel="500", induction_every=100, rows=8, repeats=8),
        checkpoint=CheckpointConfig(save="log:2000", keep="log:5000"),
    )  # fmt: skip
