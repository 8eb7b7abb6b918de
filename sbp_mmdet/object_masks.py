"""Boxes of the ground truth for masks that know where the objects are (``sampler='objects'``).

model = dict(backbone=dict(sbp_cfg=dict(sampler='objects', dropped='nearest')))
custom_hooks = [dict(type='ObjectMasksHook')]
"""

from collections.abc import Sequence

from mmdet.models.detectors import BaseDetector
from mmdet.registry import HOOKS
from mmdet.structures.bbox import BaseBoxes
from torch import Tensor, nn

from .draws import objects
from .settings import SBPSettings
from .surgery import Mixin, ModelHook, mix_in, unwrapped

__all__ = ['ObjectMasksHook', 'object_boxes']


def object_boxes(data_samples: Sequence) -> list[Tensor]:
    """Boxes of the objects of a batch, for :func:`.draws.objects`.

    Instances that the losses ignore, such as crowds, are no objects: no box and no class is learnt from them.

    Args:
        data_samples (Sequence[DetDataSample]): As the detector gets them, after the data preprocessor.

    Returns:
        list[Tensor]: For each image (B, 4), (x1, y1, x2, y2) in pixels of the padded image. Boxes of another type, as
        rotated ones, are replaced by the upright ones around them.

    Raises:
        ValueError: If there are no boxes, or boxes of another type without their type.
    """
    instances = [sample.get('gt_instances', {}) for sample in data_samples]
    return [_upright(found.get('bboxes', None)) for found in instances]


def _upright(boxes):
    if isinstance(boxes, BaseBoxes):
        return boxes.convert_to('hbox').tensor
    if boxes is None:
        raise ValueError(
            "the ground truth has no boxes, which sampler='objects' needs; load them: "
            "dict(type='LoadAnnotations', with_bbox=True)"
        )
    if boxes.shape[-1] != 4:
        raise ValueError(
            f"boxes of {boxes.shape[-1]} numbers: sampler='objects' has to know their type; "
            'set boxtype2tensor=False in the data_preprocessor'
        )
    return boxes


class _KnowsObjects(Mixin):
    """Mixed into the class of a detector."""

    def loss(self, batch_inputs, batch_data_samples, *args, **kwargs):
        with objects(object_boxes(batch_data_samples)):
            return super().loss(batch_inputs, batch_data_samples, *args, **kwargs)


@HOOKS.register_module()
class ObjectMasksHook(ModelHook):
    """Hands the boxes of the ground truth to a backbone with ``sbp_cfg=dict(sampler='objects')``, step by step.

    A batch's boxes are copied to the CPU once, where masks are drawn; on a GPU this waits for the step before. By
    itself the hook changes nothing that is computed.
    """

    exact = True

    def apply(self, model: nn.Module) -> str:
        """See :meth:`.surgery.ModelHook.apply`.

        Raises:
            ValueError: If the model has no detector of mmdet with a backbone.
        """
        detectors = [m for m in model.modules() if isinstance(m, BaseDetector) and hasattr(m, 'backbone')]
        if not detectors:
            raise ValueError(f'ObjectMasksHook: {type(model).__name__} has no detector of mmdet with a backbone')
        for detector in detectors:
            if not isinstance(detector, _KnowsObjects):
                mix_in(detector, _KnowsObjects)
        return f'the backbone of {", ".join(type(m).__name__ for m in detectors)} knows where the objects are'

    def before_train(self, runner) -> None:
        """Called by mmengine's runner, when all hooks have changed the model."""
        if 'objects' not in _samplers(unwrapped(runner.model)):
            runner.logger.warning("ObjectMasksHook: no sbp_cfg has sampler='objects', so the hook changes nothing")


def _samplers(model):
    """Of all settings of SBP in a model."""
    for module in model.modules():
        place = getattr(module, '_sbp_place', None)  # of a block that was changed in place
        settings = getattr(module, 'sbp', None) if place is None else place.settings
        if isinstance(settings, SBPSettings):
            yield settings.sampler
