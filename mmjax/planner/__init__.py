"""The planner: from times and bytes of each module and a number of devices to the best layouts.

`problem` reads the problem, `cost` computes a plan's cost, `search` finds the best plan, `fit` explains why there is
none, and `relaxation` gives a lower bound. Nothing here uses a device. Only `relaxation` imports more than NumPy.
"""
