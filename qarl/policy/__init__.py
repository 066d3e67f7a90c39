"""The quantized policy: a Hugging Face model whose linears run low-bit products with FP32 master weights."""
