"""Research studies; not part of the product."""
