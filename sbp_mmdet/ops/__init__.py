"""Operations: each file holds a forward and a backward pass, whose saved tensors are chosen by hand.

An operation computes the same output as the modules that it stands for, saves less for the backward pass, and
recomputes the rest there. Inside of an operation, ``s`` stands for its settings, ``t`` for its tensors, and ``needs``
for which of them need gradients. Its one argument from the paper is ``positions``: the kept positions of Algorithm 1
(section 3.4), or ``None`` if all send gradients.

For the kept positions, the channel MLP saves the input of its norm, or under autocast the normalised input x-hat
without the affine part of the norm. If the convolution that made the input can be recomputed
(:mod:`.common.rerun_conv`), it saves neither. The hidden layer is recomputed. In half precision, the affine part of the
norm is folded into the weights that follow it. With

    W1' = W1 diag(w_ln),  b1' = b1 + W1 b_ln,  h = x-hat W1'^T + b1',  y = GELU(h) W2^T + b2,

the gradients of the original parameters follow from those of the folded ones:

    dW1 = dW1' diag(w_ln) + db1' b_ln^T,  dw_ln = column sums of dW1' * W1,  db_ln = W1^T db1',  db1 = db1'.

The gradient of the layer scale gamma needs no saved output: with A = g^T GELU(h) for the gradient g of the block's
output, dW2 = diag(gamma) A and dgamma = row sums of A * W2 + (column sums of g) * b2.

Parameters are folded in their own precision and then cast, weight gradients of chunks are summed in fp32, and
parameters are saved uncast, so no cast copy of a weight outlives the forward pass.

:class:`.common.autograd_function.Form` says how an operation computes and saves: rounded to eight bits
(:func:`.common.precision.store`), or with weight gradients from a sample of the rows
(:func:`.common.row_sampling.sample_rows`). The forward pass is always exact.
"""
