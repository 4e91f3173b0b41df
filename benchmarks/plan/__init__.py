"""What an exact choice is worth beside the choices that people use: blocks at full size, on traces."""
