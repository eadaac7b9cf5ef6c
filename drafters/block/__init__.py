"""Semi-autoregressive drafters: a block of several tokens per forward (FLASH, ParallelSpec, DSpark, Falcon)."""
