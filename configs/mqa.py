"""The quickstart with 1 KV head(s): `mha`, `gqa` and `mqa` differ in this number alone.

Command make run CONFIG=configs/mqa.py
Time    35 s on two CPU cores
Expect  evaluation loss 1.393 (Bayes 1.278), ICL score -4.19
        (in-context unigram -0.97); L1H3 prefix matching 0.98, formed at step 383 (380-390)
"""
from configs import quickstart


def get_config():
    config = quickstart.get_config()
    config.name = "mqa"
    config.model.num_kv_heads = 1
    return config
