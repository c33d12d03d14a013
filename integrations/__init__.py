"""Thin adapters that translate each framework's words into ours; installed as ``ep_plugin.integrations``."""
