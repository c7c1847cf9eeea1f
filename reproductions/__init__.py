"""Papers run again as they are printed, with verdicts. This is no part of the package, and claims no privacy."""
