"""The control: one layer cannot compose two heads, so no induction head forms.

Its ICL score is negative all the same, from counting the tokens of the row: near the in-context unigram's, and
the summary says so.
Command make run CONFIG=configs/one_layer.py
Time    24 s on two CPU cores
Expect  evaluation loss 3.379 (Bayes 1.278), ICL score -1.42
        (in-context unigram -0.97); L0H0 prefix matching 0.04, never formed
"""
from configs import quickstart


def get_config():
    config = quickstart.get_config()
    config.name = "one_layer"
    config.model.num_layers = 1
    config.model.num_kv_heads = 4
    return config
