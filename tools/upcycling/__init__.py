"""The parts of tools/upcycle.py, one idea each."""
