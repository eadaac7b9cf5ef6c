"""DFlash 2: DFlash's block with convolutions of two taps, and scores of pairs of neighbouring tokens."""
