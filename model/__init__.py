"""What one can do with a model: define, save, load, sample, score."""
