"""`mmspec export`: draft heads for serving engines."""
