"""`mmspec compare`, and the specs of drafters that it takes."""
