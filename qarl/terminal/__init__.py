"""Terminal output: safe standard streams that neutralize untrusted text, and rich on top of them."""
