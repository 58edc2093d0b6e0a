"""Every message that crosses a boundary between parties, and its codec."""
