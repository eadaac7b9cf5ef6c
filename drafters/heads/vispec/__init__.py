"""ViSpec (arXiv 2509.15235): EAGLE's head, before which each image becomes a few learned tokens."""
