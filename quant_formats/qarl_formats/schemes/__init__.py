"""Built-in schemes, one file each. Importing this package registers them, in display order.

To add a scheme, subclass `qarl_formats.scheme.Scheme`, decorate it with `qarl_formats.registry.register`, and add its
file to the import below.
"""

from qarl_formats.schemes import bf16, w4a16, w8a8, fp8, w4a8, fp8_block, nvfp4a16  # noqa: F401, I001 (the order of lists)
