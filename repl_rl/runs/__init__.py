"""A run on disk, and all that reads it again: the store, the report, replay and the player."""
