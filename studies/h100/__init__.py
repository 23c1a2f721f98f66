"""Programs of mmjax compiled for H100s without one: FLOPs, memory, collectives, and times by a roofline.

Nothing here has run on a GPU. Times are predictions; memory, FLOPs, arrays and collectives are those of the programs
that XLA made.
"""
