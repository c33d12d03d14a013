"""Stand-ins for tests: for a cluster on one machine, and for packages that need GPUs."""
