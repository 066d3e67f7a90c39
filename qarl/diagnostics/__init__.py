"""Everything that watches a run: what it measures of precision and mismatch, and never part of the gradient.

Pure functions of log-probs (mismatch, precision, error_tokens, crossings, gradients), what runs forwards and backwards
of its own (probe, gradient_passes), what a step leaves of it (record, layout), and `qarl diagnose` (diagnose/).
"""
