"""Policies to look at instead of to train: a run, an exported checkpoint or a model, opened for inference."""
