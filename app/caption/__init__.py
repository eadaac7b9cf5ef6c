"""`mmspec caption`: resumable caption jobs."""
