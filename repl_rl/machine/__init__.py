"""This machine: its cores, its files and folders, and how a process is told to stop."""
