"""Draft-head checkpoints: native format, tensor names, config keys, and published layouts."""
