"""Open a run, an exported checkpoint or a model for inference."""
