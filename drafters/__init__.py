"""Drafters: sources of draft trees.

- `ngram`: without weights (`lookup`, `recycling`, `hybrid`).
- `heads`: trained heads, a folder per method: level by level (EAGLE-2/3, MSD, ViSpec) or several tokens per forward
  (FLASH, ParallelSpec, DSpark, Falcon, instant heads).
- `checkpoints`: heads on disk.
- `training`: losses and the trainer.

A drafter receives a `mmspec.interfaces.Prompt` and returns draft trees. It knows neither the decode loop nor the target
model, and never imports `mmspec.vision`: a compressor is passed to it. `registry` builds drafters by name, so importing
this package loads none of them.
"""
