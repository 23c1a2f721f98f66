"""``python -m mmjax.bench gpu --out=DIR``: what one GPU says, in one command that ends before a deadline.

The driver starts no backend. Every section is a process of its own: what crashes, hangs or runs out of memory ends
alone, and each can have XLA's flags as it wants them. A section writes down each figure as soon as it is known.
"""
