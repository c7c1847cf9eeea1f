"""anyorder: differentially private training for data that arrives in any order."""

__version__ = "0.1.0"
