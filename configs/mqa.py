"""The quickstart with 1 KV head(s): `mha`, `gqa` and `mqa` differ in this number alone.

Command make run CONFIG=configs/mqa.py
Time    MINUTES
Expect  EXPECT
"""
from configs import quickstart


def get_config():
    config = quickstart.get_config()
    config.name = "mqa"
    config.model.num_kv_heads = 1
    return config
