"""Dispatch and combine for large batches, on one node."""
