"""Stand-ins: for a cluster where there is one machine, and for packages that need GPUs where there are none."""
