"""The family of encoders of other encoders' tokens: a clip's images, one after another."""
