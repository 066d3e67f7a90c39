"""`rollout.numerics: fast`: vLLM's own model, kernels, attention and sampler.

Exact numerics import nothing of this package.
"""
