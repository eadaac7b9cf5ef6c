"""The tabs of `mmspec demo`."""
