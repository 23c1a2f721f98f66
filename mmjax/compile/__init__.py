"""The programs of a configuration, compiled for GPUs that are not here: memory, work, and times by a roofline."""
