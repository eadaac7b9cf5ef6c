"""The pages of `mmspec demo`: plain and speculative answers side by side, decoding rounds, captions of many files.

`comparison`, `report` and `batch` do the work without gradio; `tabs`, `api` and `server` present it.
"""
