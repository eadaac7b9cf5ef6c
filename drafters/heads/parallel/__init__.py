"""ParallelSpec (arXiv 2410.05589): k tokens from one forward over learned mask embeddings."""
