"""One layer with a smeared key: each key may carry the token before it, and that is all an induction head needs.

The experiment of Olsson et al. (2022), Argument 2, against `one_layer`.
Command make run CONFIG=configs/one_layer_smeared.py
Time    MINUTES
Expect  EXPECT
"""
from configs import one_layer


def get_config():
    config = one_layer.get_config()
    config.name = "one_layer_smeared"
    config.model.smeared_key = True
    return config
