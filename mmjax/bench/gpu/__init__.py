"""``python -m mmjax.bench gpu --out=DIR``: measures one GPU, and ends before a deadline.

The driver starts no backend. Every section is a process of its own, with its own XLA flags: one that crashes,
hangs or runs out of memory stops no other. A section writes each figure to its file as soon as it is known.
"""
