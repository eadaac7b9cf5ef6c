"""The training recipe and evaluation of the scenes model."""
