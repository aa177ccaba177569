"""Files of a policy: formats, names of parameters, checks of weights, adapters."""
