"""Running schedules: stage programs, what a stage owns, executors."""
