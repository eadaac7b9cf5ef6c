"""DSpark and DFlash with layers of Gemma 4 (DeepSpec)."""
