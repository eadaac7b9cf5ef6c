"""Controllers that choose, from measured costs and acceptance, how much to draft."""
