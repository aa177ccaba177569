"""Everything that measures: experiments, and how fast each part is beside the ways that others go."""
