"""The planner: from times and bytes of each module and a number of devices to the best layouts.

`problem` reads what is asked, `cost` says what a plan costs, `search` finds the best one, `fit` says why there is none,
`relaxation` bounds it from below. Nothing here knows a device; NumPy alone is imported until a bound is asked for.
"""
