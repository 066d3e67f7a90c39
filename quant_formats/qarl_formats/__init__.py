"""Low-bit formats: quantization schemes, quantized weights, and compressed-tensors files.

`scheme`, `registry` and `compressed` import no torch; `weight` does. Import the module you need.
"""
