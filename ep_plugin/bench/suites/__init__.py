"""The suites, each a command of `ep-bench`: `ep_plugin.bench.cli` lists them."""
