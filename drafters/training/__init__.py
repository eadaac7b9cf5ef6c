"""Training of draft heads: trainer, batches, losses."""
