"""`bench nested`: nested schedules beside Optimus, DistTrain and replicated encoders, in the setting of BigMac (§4).

* `models`, `cluster`: both of the paper's models as configurations, on 128 H800 by the planner's times and bytes.
* `systems`: schedules and placements; each system has the fastest that fits.
* `in_flight`: microbatches in flight, counted.
* `measured`: the systems as real processes whose ops sleep.
* `command`: rows and tables of all of it.
"""
