"""Rollout engines: they sample responses from the published policy."""
