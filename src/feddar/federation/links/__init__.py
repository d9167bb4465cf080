"""How bytes travel between the coordinator and sites: on Flower, on NVIDIA FLARE, or in one process."""
