"""`mmspec compare`."""
