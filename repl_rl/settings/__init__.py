"""Settings: typed dataclasses that are read from flags and TOML files, and registries of named components."""
