"""Gathers and sums inside a node, on CPUs and on GPUs."""
