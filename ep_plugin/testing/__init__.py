"""What stands in for a cluster where there is one machine, and for GPUs where there are none."""
