"""Evaluation of quantized policies on the papers' task sets, with confidence intervals."""
