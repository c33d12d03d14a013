"""What stands in for a cluster where there is one machine."""
