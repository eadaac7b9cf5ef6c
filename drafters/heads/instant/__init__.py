"""Instant heads (after Medusa and Hydra): k tokens from the last hidden state, without attention."""
