"""Evaluation: estimators with intervals, the papers' task sets, and running them on a quantized policy."""
