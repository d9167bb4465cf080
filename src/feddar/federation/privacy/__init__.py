"""What limits what can be learned about a patient from what leaves a site."""
