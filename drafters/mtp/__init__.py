"""The head for several tokens ahead (multi-token prediction, MTP) that a target's checkpoint brings along."""
