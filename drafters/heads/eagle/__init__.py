"""EAGLE-1/2 (arXiv 2401.15077, 2406.16858) and MSD (arXiv 2505.14260): a tree level by level, one forward each."""
