"""Machine-level utilities: cores, files and folders, child processes, and shutdown on signals."""
