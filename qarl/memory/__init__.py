"""Estimates of memory, and the sizes that follow from it. Imports no torch at its top."""
