"""The quickstart with 2 KV head(s): `mha`, `gqa` and `mqa` differ in this number alone.

Command make run CONFIG=configs/gqa.py
Time    35 s on two CPU cores
Expect  evaluation loss 1.381 (Bayes 1.278), ICL score -4.20
        (in-context unigram -0.97); L1H1 prefix matching 0.99, formed at step 251 (250-260)
"""
from configs import quickstart


def get_config():
    config = quickstart.get_config()
    config.name = "gqa"
    config.model.num_kv_heads = 2
    return config
