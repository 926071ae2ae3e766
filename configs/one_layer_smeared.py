"""One layer with a smeared key: each key may carry the token before it, and that is all an induction head needs.

The experiment of Olsson et al. (2022), Argument 2, against `one_layer`.
Command make run CONFIG=configs/one_layer_smeared.py
Time    61 s on two CPU cores
Expect  evaluation loss 1.405 (Bayes 1.278), ICL score -4.24
        (in-context unigram -0.97); L0H3 prefix matching 0.83, formed at step 158 (150-160)
"""
from configs import one_layer


def get_config():
    config = one_layer.get_config()
    config.name = "one_layer_smeared"
    config.steps = 3000  # the control stays at chance for as long
    config.model.smeared_key = True
    return config
