"""Pairs of a picture or clip and a question that a page offers: their answers are long enough to be drafted."""

from __future__ import annotations

DETAIL = "Describe the picture in detail."
SAMPLE_PAIRS = (
    ("rocket_rainbow_bucket_telescope.png", DETAIL),
    ("microphone_telephone_taxi_gorilla_cherry_camera.png", DETAIL),
    ("cake_appears.mp4", "Describe the clip in detail."),
    ("pretzel_pumpkin_cat.png", DETAIL),
)
TEXT_QUESTIONS = ("Explain how a bicycle stays upright.", "Write a short story about a lighthouse.")
"""Of a language model."""
