"""The control: one layer cannot compose two heads, so no induction head forms.

Its ICL score is negative all the same, from counting the tokens of the row: near the in-context unigram's, and
the summary says so.
Command make run CONFIG=configs/one_layer.py
Time    MINUTES
Expect  EXPECT
"""
from configs import quickstart


def get_config():
    config = quickstart.get_config()
    config.name = "one_layer"
    config.steps = 3000
    config.model.num_layers = 1
    config.model.num_kv_heads = 4
    return config
