"""`research.bench`: interleaved speed measurements."""
