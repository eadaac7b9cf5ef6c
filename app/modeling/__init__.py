"""Model loading, chat prompts, captioning, random models."""
