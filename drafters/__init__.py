"""Drafters: ways to guess how the text goes on, one file each.

A drafter sees what `mmspec.interfaces.Prompt` holds and returns draft trees. It knows neither the decode loop nor the
target's model, and never imports `mmspec.vision`: a compressor is handed to it. Names are looked up by
`mmspec.patching`, so importing this package loads none of them.
"""
