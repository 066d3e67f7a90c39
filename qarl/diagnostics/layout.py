"""The layout of RUN/diagnostics/NNNNNN.json, for those who write it and those who read it. Imports no torch."""

from __future__ import annotations

FORMAT_VERSION = 1  # of the record; raised when what is in it changes its name or its meaning
