"""`rollout.numerics: exact`: a model of vLLM that is the policy's own forward on the published tensors."""
