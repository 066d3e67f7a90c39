"""Checks of a configuration against the machine and the model: files, paths, sizes, ranks. They load no data."""
