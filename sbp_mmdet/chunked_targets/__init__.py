"""Training targets computed in chunks: the same targets in less memory."""

import re

from torch import nn

from .assigners import assigners_in_chunks
from .dense_losses import losses_in_chunks
from .mask_heads import mask_heads_in_chunks
from .query_heads import query_heads_in_chunks

__all__ = ['targets_in_chunks']


def targets_in_chunks(model: nn.Module, masks: int = 4, pairs: int = 2**20) -> str:
    """Make the heads of a detector compute their training targets in chunks. The targets stay the same.

    mmdet computes some targets in one piece while all feature maps of the step are in memory:

    - A mask head makes a float copy of a whole-image mask for each positive proposal: 550 MB for 128 proposals of an
      image of 800 x 1344 pixels. In chunks, a float copy is made for each object, and ``masks`` of them exist at a
      time.
    - An assigner compares all priors with all ground-truth boxes, which takes nine numbers for each pair; the dynamic
      ones (SimOTA, RTMDet's) do so in each class. In chunks, ``pairs`` of them exist at a time, and one number remains.
      IoU and IoF of boxes in fp32 and fp64 are computed in place: two temporary numbers for each pair, in chunks of up
      to ``4 * pairs``. Further matrices of all pairs, such as the distances of ATSS, are the assigner's own and stay.
    - Mask2Former holds the masks of a batch as integers of eight bytes, and MaskFormer's losses save ten maps of the
      size of an image for each object and decoder layer. In chunks, masks take a byte, and these losses are
      checkpointed.
    - Focal losses of dense heads (also quality and varifocal losses) save some ten maps of all priors and classes. In
      chunks, they save the predictions, and ``pairs`` of a prior and a class exist at a time.

    Only losses, heads and assigners of mmdet whose computation is known are changed; the returned text names them, and
    the assigners that are left unchanged.

    Args:
        model (nn.Module): Detector, changed in place. Calling this function again changes the sizes of the chunks.
        masks (int): Number of whole masks that exist as floats at a time. Default: 4.
        pairs (int): Number of pairs of a prior and a ground-truth box that are compared at a time, or of a
            prior and a class in a loss. Default: 2**20.

    Returns:
        str: Names of the losses and heads that were changed and of the assigners that were not, for the log.

    Raises:
        ValueError: If ``masks`` or ``pairs`` is not a positive integer.

    Example:
        >>> model = MODELS.build(config.model)
        >>> print(targets_in_chunks(model))
        training targets are computed in chunks: overlaps in rpn_head, roi_head; masks in roi_head.mask_head
    """
    for name, value in dict(masks=masks, pairs=pairs).items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f'{name}={value!r} must be a positive integer')
    overlaps, unchanged = assigners_in_chunks(model, pairs)
    changes = dict(overlaps=overlaps, masks=mask_heads_in_chunks(model, masks), **query_heads_in_chunks(model, masks))
    changes |= dict(losses=losses_in_chunks(model, pairs))
    changed = '; '.join(f'{what} in {", ".join(_join_numbers(heads))}' for what, heads in changes.items() if heads)
    message = f'training targets are computed in chunks: {changed}'
    if not changed:
        message = 'no training targets in chunks, because no assigner, mask head or loss that supports it was found'
    left = ', '.join(f'{name} ({reason})' for name, reason in unchanged.items())
    return f'{message}. The other assigners work as before: {left}' if left else message


def _join_numbers(names):
    """Return names in which members of one list share an entry: 'head.{0,1}.loss' for 'head.0.loss', 'head.1.loss'."""
    members = {}
    for name in names:
        before, *rest = re.split(r'\b(\d+)\b', name, maxsplit=1)
        number, after = rest or ('', '')
        members.setdefault((before, after), []).append(number)
    return [
        before + (numbers[0] if len(numbers) == 1 else f'{{{",".join(numbers)}}}') + after
        for (before, after), numbers in members.items()
    ]
