"""Vision: compressors of visual tokens and ways to read frames from a video, one file each.

What is made here is seen by drafters only, or (frames) by target and baseline alike; it never changes what the target
returns. Nothing here knows the decode loop or imports `mmspec.drafters`.
"""
