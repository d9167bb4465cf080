"""Keys and certificates for TLS and for the authentication of sites."""
