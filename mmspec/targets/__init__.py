"""Adapters between transformers models and the decode loop."""
