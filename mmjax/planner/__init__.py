"""The planner: from times and bytes of each module and a number of devices to the best layouts.

`problem` reads the question, `cost` computes a plan's cost, `search` finds the best plan, `fit` explains why there is
none, and `relaxation` gives a lower bound. Nothing here touches a device. Only NumPy is imported until a bound is asked
for.
"""
