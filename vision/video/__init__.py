"""Video decoding and frame sampling."""
