"""A training step of mmjax beside the same step of PyTorch and transformers, on the same machine."""
