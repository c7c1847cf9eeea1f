"""Secret sampling with any noise: how much of a unit is hidden by not knowing its steps."""
