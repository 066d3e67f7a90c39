"""The native rollout engine: in process, on the policy's own modules and tensors."""
