"""What a round costs and brings, as measured, and the one rule by which it is chosen."""
