"""`mmspec train`: training draft heads for a target."""
