"""Wide tables: noise only where it is needed, lazily and exactly, or on rows that are chosen privately."""

__all__: list[str] = []
