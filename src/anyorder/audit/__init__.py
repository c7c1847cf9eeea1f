"""The claim attacked: canaries with secret coins, scores that know the mechanism, bounds named by what they assume."""

__all__: list[str] = []
