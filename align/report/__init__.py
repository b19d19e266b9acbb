"""What a run says to people."""
