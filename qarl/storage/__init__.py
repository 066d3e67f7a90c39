"""Files on disk: run directories, checkpoints, tensor files and crash-safe writes."""
