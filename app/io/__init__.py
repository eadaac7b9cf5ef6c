"""Input sources, image and video decoding limits, JSON lines, output files."""
