"""`rollout.numerics: exact`: vLLM keeps weights, schedules and pages; what is computed is the policy's own forward."""
