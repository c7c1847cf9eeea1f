"""Kairouz et al. 2021, figure by figure."""
