"""The torch front end: the engine, the FTRL optimizer, public numbers, checkpoints."""
