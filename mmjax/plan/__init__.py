"""Plans of a configuration: the planner's input, and the configurations, tables and pictures of its plans."""
