"""Captions in Ray Data pipelines: `CaptionActor`, a class for `Dataset.map_batches`. Needs the extra `ray`.

The implementation is `mmspec.app.caption.ray_actor`; this module is its public name.
"""

from mmspec.app.caption.ray_actor import CaptionActor as CaptionActor

__all__ = ["CaptionActor"]
