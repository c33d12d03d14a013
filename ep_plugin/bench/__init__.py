"""ep-bench: what ep_plugin is measured with. Correctness before every timing, peers in the same run."""
