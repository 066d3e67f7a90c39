"""Low-bit formats: what a scheme is, how a weight is quantized and packed, and compressed-tensors in and out.

`scheme` and `compressed` import no torch; `quantize` and `packing` do. Import the module you need.
"""
