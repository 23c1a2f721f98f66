"""Running schedules: stage programs, the state of stages, executors."""
