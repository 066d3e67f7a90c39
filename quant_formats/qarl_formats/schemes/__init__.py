"""The schemes that come with qarl, one file each; importing this registers them, in the order in which lists show them.

Another one is a subclass of `qarl_formats.scheme.Scheme` under `qarl_formats.registry.register`, wherever it stands.
"""

from qarl_formats.schemes import bf16, w4a16, w8a8, fp8, w4a8, fp8_block, nvfp4a16  # noqa: F401, I001 (the order of lists)
