"""The site that `make docs` builds: the pages of the repository, and those that are made of its code."""
