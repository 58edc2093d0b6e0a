"""What a client shares of its images, and what can be reconstructed from it."""
