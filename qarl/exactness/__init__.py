"""Checks that sampler and learner agree bit for bit on this machine, and locates the first difference if not."""
