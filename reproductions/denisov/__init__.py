"""Parts of `reproductions.denisov2022`."""
