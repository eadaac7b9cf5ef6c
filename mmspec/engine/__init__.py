"""The decode loop and its parts: trees, verification, sampling, the key-value cache, the output buffer."""
