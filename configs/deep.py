"""Eight layers of eight heads on Python's own standard library: enough heads to ask how many of them can go.

Command make run CONFIG=configs/deep.py, then python eval.py --workdir=runs/deep --task=prune (docs/results.md)
Time    15 min on two CPU cores with other work beside it
Expect  evaluation loss 2.705 (smoothed bigram line 3.573), ICL score -0.08
        (in-context unigram -0.90); L6H7 prefix matching 0.10 (chance 0.03), strength 0.5 not reached
"""
from configs import stdlib


def get_config():
    config = stdlib.get_config()
    config.name = "deep"
    config.steps = 2000
    config.model.num_layers = 8
    config.model.num_heads = config.model.num_kv_heads = 8
    config.optimizer.learning_rate, config.optimizer.end_learning_rate = 2e-3, 2e-4
    return config
