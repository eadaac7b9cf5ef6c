"""Falcon (arXiv 2412.12639): k tokens from every forward, several forwards, block behind block."""
