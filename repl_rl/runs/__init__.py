"""Run folders on disk and their readers: the store, the report, replay and the player."""
