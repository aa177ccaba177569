"""Adapters for other libraries.

Entry points register them, like those of any installed package. No other package of repl_rl imports them.
"""
