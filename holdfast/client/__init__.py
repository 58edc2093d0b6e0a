"""The client: one institution or device, with its images, its memory and its local training."""
