"""Trainers of other packages with private gradients."""
