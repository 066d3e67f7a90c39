"""Comparisons of schemes, learners and seeds: whole runs with RL, or one model without RL."""
