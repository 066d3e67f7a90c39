"""`rollout.numerics: exact`: a vLLM model that runs the policy's own forward on the published tensors."""
