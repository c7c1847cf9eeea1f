"""Parts of `reproductions.zhang2021`."""
