"""The quickstart with 2 KV head(s): `mha`, `gqa` and `mqa` differ in this number alone.

Command make run CONFIG=configs/gqa.py
Time    MINUTES
Expect  EXPECT
"""
from configs import quickstart


def get_config():
    config = quickstart.get_config()
    config.name = "gqa"
    config.model.num_kv_heads = 2
    return config
