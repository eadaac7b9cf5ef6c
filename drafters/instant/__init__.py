"""Instant heads: light heads on the target's last hidden state, which can be learned while the target is used."""
