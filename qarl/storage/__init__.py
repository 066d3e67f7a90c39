"""What is on disk: run directories, checkpoints, tensor files, and writing that a crash cannot leave half-done."""
