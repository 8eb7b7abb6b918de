"""Building blocks that the operations share."""
