"""`rollout.numerics: fast`: vLLM's own model, attention and sampler, with vLLM's linear kernels or qarl's.

Exact numerics import nothing of this package.
"""
