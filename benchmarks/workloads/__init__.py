"""Workloads that benchmarks read, with the programs that wrote them."""
