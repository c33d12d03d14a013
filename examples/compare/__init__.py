"""Trains one model through ep_plugin and through what is built in, and compares loss and speed. See cli.py."""
