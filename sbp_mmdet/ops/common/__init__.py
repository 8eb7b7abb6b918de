"""Building blocks that the operations share: autograd functions, chunks of rows, folding, precision, saved forms."""
