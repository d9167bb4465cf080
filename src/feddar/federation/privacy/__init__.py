"""Privacy processors, which limit what can be learned about a patient from what leaves a site."""
