"""Draft-head checkpoints: the native format, loading, published layouts."""
