"""LiLiCorr (arXiv 2608.20530): DFlash's block, and scores of pairs of candidates that have seen each other."""
