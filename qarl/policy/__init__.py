"""The quantized policy: a Hugging Face model with low-bit linear layers and FP32 master weights."""
