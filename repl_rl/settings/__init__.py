"""How settings are read, and how code of the user is found by name."""
