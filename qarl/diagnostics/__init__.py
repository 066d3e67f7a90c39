"""Diagnostics of precision and mismatch. They observe a run and never contribute to the gradient.

Pure functions of log-probs: mismatch, precision, error_tokens, crossings, gradients. Extra forwards and backwards:
probe, gradient_passes. The record of a step: record. `qarl diagnose`: qarl/diagnose.
"""
