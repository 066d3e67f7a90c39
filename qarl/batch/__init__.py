"""What one step learns from: packed responses and their columns, micro-batches, and observers of the training loop."""
