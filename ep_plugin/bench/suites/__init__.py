"""The suites. Each is a command of `ep-bench`, and `ep_plugin.bench.cli` lists them."""
