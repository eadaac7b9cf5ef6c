"""Training-free drafters: prompt lookup, token recycling and their union."""
