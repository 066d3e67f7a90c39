"""Low-bit formats: quantization schemes, quantized weights, and compressed-tensors files.

`scheme`, `registry`, `schemes` and `compressed` import no torch; `weight` does. Import the module you need.
"""

import qarl_formats.schemes  # noqa: F401 (registers the built-in schemes)
