"""Faults that a run survives: strikes at random moments, interrupted runs, soak tests, the cost of checkpoints."""
