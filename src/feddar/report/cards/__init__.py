"""Model cards: what is read of a run, the sections made from it, and the files that they are written to."""
