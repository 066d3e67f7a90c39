"""Correction of the mismatch between sampler and learner: importance weights, rejection of responses, and a veto.

The part of an objective that multiplies its surrogate, without gradient. Bounds are on ratios learner over sampler,
never on the inverse. What is rejected keeps its place in the aggregation's denominators (VeXact, equations 8 to 11).
`config` has the keys of the `correction` section and `presets` their named combinations; `weights` and `rejection` have
the maths, and `combined` puts them together. `config`, `weights` and `rejection` load no torch.
"""
