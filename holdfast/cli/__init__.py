"""The commands of `holdfast`."""

from holdfast.cli.application import app, main

__all__ = ["app", "main"]
