"""The parts of `tools/fuzz.py`: what it mutates, how it runs a command line, and what it makes of the outcome."""
