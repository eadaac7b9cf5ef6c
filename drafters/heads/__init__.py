"""Trained draft heads: a folder per method, with its config, network, drafter, loss and recipe.

`base` is what all of them share. Nothing outside of a method's folder names it: whoever needs a method asks `registry`.
"""
