"""A training run: its parts, steps, metrics, pictures and evaluation."""
