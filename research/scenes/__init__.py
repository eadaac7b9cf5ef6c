"""The drawn scenes, and the training recipe and evaluation of the model of them."""
