"""Autoregressive draft heads on target hidden states: EAGLE, MSD, ViSpec."""
