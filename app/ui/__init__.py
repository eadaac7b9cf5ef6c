"""The page of `mmspec demo`: a chat with mmspec's answer, and plain `generate`'s beside it."""
