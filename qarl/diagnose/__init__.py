"""Diagnose a finished step: recompute its log-probs with the checkpoint's weights, measure, and interpret."""
