"""Tests of ep_plugin: a package, so that the processes a test starts can import what they run."""
