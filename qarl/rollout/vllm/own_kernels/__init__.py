"""`rollout.numerics: fast`: vLLM's own model, kernels, attention and sampler.

With exact numerics nothing of this package is imported.
"""
