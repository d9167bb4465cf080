"""Links, which carry bytes between the coordinator and sites: Flower, NVIDIA FLARE, or one process."""
