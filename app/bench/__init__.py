"""`mmspec bench`: interleaved speed measurements."""
