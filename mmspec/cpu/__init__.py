"""Fast paths on CPUs: linear layers over few rows, bfloat16 detection."""
