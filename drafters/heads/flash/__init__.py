"""FLASH (arXiv 2505.12728): k tokens from one forward by a wide feed-forward. It is not FlashAttention."""
