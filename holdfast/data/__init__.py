"""Images, classes and who meets them when."""
