"""Fast paths on CPUs: linear layers with few rows, detection of useful bfloat16."""
