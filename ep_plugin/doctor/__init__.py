"""The command `ep-doctor` finds what would stop or slow a job on this machine, and says what to do about it."""
