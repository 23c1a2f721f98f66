"""NVIDIA's tables of heterogeneous parallelism as predictions: ``docs/nvidia.md``."""
