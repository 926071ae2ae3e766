"""The quickstart with 4 KV head(s): `mha`, `gqa` and `mqa` differ in this number alone.

Command make run CONFIG=configs/mha.py
Time    33 s on two CPU cores
Expect  evaluation loss 1.368 (Bayes 1.278), ICL score -4.18
        (in-context unigram -0.97); L1H3 prefix matching 0.99, formed at step 248 (240-250)
"""
from configs import quickstart


def get_config():
    config = quickstart.get_config()
    config.name = "mha"
    config.model.num_kv_heads = 4
    return config
