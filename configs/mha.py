"""The quickstart with 4 KV head(s): `mha`, `gqa` and `mqa` differ in this number alone.

Command make run CONFIG=configs/mha.py
Time    MINUTES
Expect  EXPECT
"""
from configs import quickstart


def get_config():
    config = quickstart.get_config()
    config.name = "mha"
    config.model.num_kv_heads = 4
    return config
