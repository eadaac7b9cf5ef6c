"""DSpark (arXiv 2607.05147) and DFlash: a block of tokens from one forward over its own positions."""
