"""The batch of a training step: responses with per-token columns, micro-batches, and observers of the training loop."""
