"""Numeric kernels of qarl: functions from tensors and numbers to tensors. Depends only on torch and triton."""
