"""Low-latency dispatch and combine: rows go to fixed slots, ranks exchange no counts, and the host never waits."""
