"""The benchmarks of ep_plugin, `ep-bench`. Every result is compared with an oracle before anything is timed.

A suite is a frozen dataclass in `suites/`, derived from `suite.Suite`. Its fields are the options of its command, and
its `measure` runs on every rank. `cli.py` lists the suites.
"""
