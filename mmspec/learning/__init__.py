"""Online learning of drafters: examples of accepted rounds, steps between calls, learned weights on disk."""
