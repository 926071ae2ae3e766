"""Induction heads held back, then let go: the first layer is silenced until after they would have formed.

Clamping a part of the network while it trains, after Singh et al. (2024): without the previous-token head of the first
layer nothing forms in the second, and once it may write, induction heads form as they always do. Probes see the free
model throughout. (Silencing the second layer instead, --config.interventions.heads=1.0,1.1,1.2,1.3, leaves a model
that goes on counting tokens: nothing forms by step 1,000.)
Command make run CONFIG=configs/suppressed.py
Time    35 s on two CPU cores
Expect  evaluation loss 1.404 (Bayes 1.278), ICL score -4.21
        (in-context unigram -0.97); L1H2 prefix matching 0.98, formed at step 475 (470-480)
"""
from configs import quickstart
from mha_jax.config import InterventionsConfig


def get_config():
    config = quickstart.get_config()
    config.name = "suppressed"
    config.interventions = InterventionsConfig(heads="0.0,0.1,0.2,0.3", kind="zero", start=0, end=300)
    config.optimizer.schedule = "constant"  # else what is left of the cosine is too little
    return config
