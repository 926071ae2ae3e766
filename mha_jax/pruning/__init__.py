"""Which heads can go: ablation sweeps, importance, gates, pruning curves. Pure functions of arrays."""
