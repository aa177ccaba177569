"""Consoles: lines per second beside stock ipykernel, host functions, workspaces, doctests."""
