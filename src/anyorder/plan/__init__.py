"""The claim: a plan, how it is found, what compares it with others, and its certificate and receipts, in files."""
