"""Parts of `reproductions.huang2023`."""
