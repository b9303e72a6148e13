"""Code that runs in worker processes only: it imports nothing of the package outside this folder, and no torch."""
