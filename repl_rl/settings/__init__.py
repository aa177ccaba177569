"""Parsing of settings, and import of user code by name."""
