"""Low-bit formats: schemes, the weight in one of them, and compressed-tensors files.

`scheme`, `registry` and `compressed` import no torch; `weight` does. Import the module you need.
"""
