"""The plan carried out: ledger, journal, checkpoint, noise. The only room where a sum becomes a release."""
