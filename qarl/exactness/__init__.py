"""Proof that sampler and learner agree bit for bit on this machine, and where they part if they do not."""
