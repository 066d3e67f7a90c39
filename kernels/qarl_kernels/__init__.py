"""Numeric kernels of qarl: tensors and numbers in, tensors out. Depends on torch and triton alone."""
