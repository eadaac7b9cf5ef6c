"""Drafters that decode with a whole model: the target with fewer layers, or a smaller model."""
