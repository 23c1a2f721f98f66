"""Training: the run of a configuration in a directory, its steps, metrics, checkpoints and ends."""
