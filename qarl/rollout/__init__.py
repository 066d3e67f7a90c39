"""Rollout engines: what draws responses from the published policy."""
