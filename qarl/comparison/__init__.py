"""Comparing schemes, learners and seeds: whole runs, or one model without RL."""
