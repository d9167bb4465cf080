"""The link on NVIDIA FLARE: bytes between a FLARE server and its sites, through FLARE's Collab API.

`job` writes the job that a FLARE administrator submits, `app` is the code that runs at the server and at each site,
`site_file` reads the configuration of a site's own administrator, and `simulator` runs a job on this machine. Only
`app` imports FLARE.
"""
