"""Audio encoders with a convolutional stem."""
