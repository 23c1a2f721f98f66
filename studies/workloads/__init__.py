"""The papers' workloads: each a configuration, in the planner's estimate, beside its paper's figures."""
