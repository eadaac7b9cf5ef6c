"""Vision: compressors of the drafter's visual tokens, image and video decoding.

Compressor output is read by drafters only. Decoded images and frames are the same for the target and the baseline, so
nothing in this package changes what the target generates. It depends neither on the decode loop nor on
`mmspec.drafters`.
"""
