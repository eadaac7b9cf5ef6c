"""Domino (SpecForge): DFlash's block, corrected by a recurrent network over the tokens before each position."""
