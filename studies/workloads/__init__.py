"""The papers' workloads: each a configuration, in the planner's estimate, beside what its paper prints."""
