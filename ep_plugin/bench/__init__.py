"""ep-bench: what ep_plugin is measured with. Results are compared with an oracle before anything is timed.

A suite is one file in `suites/`: a frozen dataclass, derived from `suite.Suite`, whose fields are the options of its
command and whose `measure` runs on every rank. `cli.py` lists the suites.
"""
