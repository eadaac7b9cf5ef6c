"""Draft-head checkpoints: own format, tensor names, config keys, and published layouts."""
