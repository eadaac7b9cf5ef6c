"""EAGLE-3 (arXiv 2503.01840): several hidden states, an LM head and a vocabulary of its own."""
