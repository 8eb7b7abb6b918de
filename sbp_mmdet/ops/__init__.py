"""The gradients of Algorithm 1 in less memory: what each operation stores for the backward pass is chosen by hand.

Stored are, for the kept positions only, the normalised input x-hat (without the affine part) and its reciprocal
standard deviation; where the convolution that made the input can be run again (:mod:`.common.rerun_conv`), not even those. The
hidden layer of the channel MLP is computed again. With the affine part of the norm folded into the weights that follow,

    W1' = W1 diag(w_ln),  b1' = b1 + W1 b_ln,  h = x-hat W1'^T + b1',  y = GELU(h) W2^T + b2,

the gradients of the original parameters follow from those of the folded ones:

    dW1 = dW1' diag(w_ln) + db1' b_ln^T,  dw_ln = column sums of dW1' * W1,  db_ln = W1^T db1',  db1 = db1'.

The gradient of the layer scale gamma needs no stored output: with A = g^T GELU(h) for the gradient g of the block's
output, dW2 = diag(gamma) A and dgamma = row sums of A * W2 + (column sums of g) * b2.

Precision: parameters are folded in their own precision and then cast, weight gradients of chunks are added in fp32, and
parameters are saved uncast, so that no cast copy of a weight outlives the forward pass.

A :class:`Form` says what a step trades: what is stored may be rounded to eight bits (:func:`.precision.store`), and
gradients of weights may come from a sample of the rows (:func:`.common.row_sampling.draw`). The forward pass is always exact.
"""
