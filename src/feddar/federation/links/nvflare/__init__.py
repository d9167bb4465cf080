"""The engine on NVIDIA FLARE: bytes between a FLARE server and its sites, through FLARE's Collab API.

`job` writes what a FLARE administrator submits, `app` is what then runs at the server and at each site, `local` reads
what a site's own administrator says there, and `simulator` runs a job on this machine. Only `app` imports FLARE.
"""
