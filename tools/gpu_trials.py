"""The measurements of the GPU report: detectors, modules, sizes and presets."""

import dataclasses

__all__ = [
    'BLOCKS',
    'CAPS',
    'FAMILIES',
    'MODULES',
    'MORE_CAPS',
    'MORE_MODULES',
    'PROFILED',
    'RIVALS',
    'SHAPES',
    'SMOKE',
    'STEPS',
    'SYNC_BN',
    'Trial',
]

_OURS = 'configs/sbp_convnext/'
CONVNEXT_T = _OURS + 'mask-rcnn_convnext-t_fpn_amp-ms-crop-3x_coco.py'
CONVNEXT_B = _OURS + 'cascade-mask-rcnn_convnext-b_fpn_4conv1fc-giou_amp-ms-crop-3x_coco.py'
CONVNEXT_V2 = 'configs/lean/mask-rcnn_convnext-v2-b_fpn_lean-amp-ms-crop-3x_coco.py'
SHAPES = _OURS + 'mask-rcnn_sbp-convnext-atto_fpn_quickstart_shapes.py'
R50 = 'mmdet::mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py'
RTMDET_S = 'mmdet::rtmdet/rtmdet_s_8xb32-300e_coco.py'
DINO = 'mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py'
DINO_SWIN_L = 'mmdet::dino/dino-5scale_swin-l_8xb2-12e_coco.py'
SWIN_S = 'mmdet::swin/mask-rcnn_swin-s-p4-w7_fpn_amp-ms-crop-3x_coco.py'
VIT = 'configs/sbp_vit/mask-rcnn_vit-{}_fpn_amp-ms-crop-3x_coco.py'

_EXACT = ('none', 'with_cp', 'exact', 'exact_min', 'int8')
_ALL = (*_EXACT, 'sampled', 'sbp')
_SWIN_B = {
    'model.backbone.embed_dims': 128,
    'model.backbone.num_heads': [4, 8, 16, 32],
    'model.neck.in_channels': [128, 256, 512, 1024],
}
# For rehearsals on a CPU: as few channels, proposals and queries as the models can do with.
_FEW_ROIS = {'model.train_cfg.rcnn.sampler.num': 16, 'model.train_cfg.rpn_proposal.max_per_img': 20}
_FEW_FC = {'model.roi_head.bbox_head.fc_out_channels': 32, **_FEW_ROIS}
_FEW_QUERIES = {
    'model.num_queries': 20,
    'model.dn_cfg.group_cfg.num_dn_queries': 8,
    'model.encoder.num_layers': 2,
    'model.encoder.layer_cfg.ffn_cfg.feedforward_channels': 64,
    'model.decoder.num_layers': 2,
    'model.decoder.layer_cfg.ffn_cfg.feedforward_channels': 64,
}
_TINY_CONVNEXT = {
    'model.backbone.arch': dict(_delete_=True, depths=[2, 1, 1, 1], channels=[8, 16, 32, 64]),
    'model.neck.in_channels': [8, 16, 32, 64],
    **_FEW_FC,
}
_TINY_SWIN = {
    'model.backbone.embed_dims': 24,
    'model.backbone.depths': [2, 1, 1, 1],
    'model.backbone.num_heads': [3, 6, 12, 24],
    'model.neck.in_channels': [24, 48, 96, 192],
}
_VIT_OF_TWO_BLOCKS = dict(_delete_=True, embed_dims=192, num_layers=2, num_heads=3, feedforward_channels=768)
_TINY = {
    R50: {'model.backbone.base_channels': 8, 'model.neck.in_channels': [32, 64, 128, 256], **_FEW_FC},
    SWIN_S: {**_TINY_SWIN, **_FEW_FC},
    DINO_SWIN_L: {**_TINY_SWIN, **_FEW_QUERIES},
    DINO: {
        **_FEW_QUERIES,
        'model.backbone.base_channels': 8,
        'model.neck.in_channels': [64, 128, 256],
    },
    SHAPES: _TINY_CONVNEXT,
    VIT.format('t'): {'model.backbone.arch': _VIT_OF_TWO_BLOCKS, **_FEW_FC},
    RTMDET_S: {
        'model.backbone.widen_factor': 0.125,
        'model.neck.in_channels': [32, 64, 128],
        'model.neck.out_channels': 32,
        'model.bbox_head.in_channels': 32,
        'model.bbox_head.feat_channels': 32,
    },
}


@dataclasses.dataclass(frozen=True)
class Trial:
    """A module of a detector, or the steps of one, by preset.

    Attributes:
        name (str): Its name in the report.
        config (str): Config of the detector.
        presets (tuple[str, ...]): Presets and rivals; the first is what others are compared with.
        module (str): Name of the submodule. Default: 'backbone'.
        amp (str): Precision of a module: 'fp16', 'bf16' or 'off'. Default: 'fp16'.
        batch (int): Number of images. Default: 2.
        size (tuple[int, int]): Height and width of the images in pixels. Default: (800, 1344).
        boxes (int): Number of boxes in an image. Default: 60.
        rounds (int): Number of timed rounds. Default: 20.
        channels_last (bool): Whether input and weights are stored as (N, H, W, C). Default: False.
        cap (int | None): GiB that torch may have. If ``None``, all of the GPU. Default: None.
        options (dict): Overrides of the config.
        counted (str): Its detector in docs/results/memory_overview.json. Default: none.
        times (str): Times of it on a CPU, docs/results/time_*.json. Default: none.
        issue (str): Its model in docs/results/issue_time.json. Default: none.
    """

    name: str
    config: str
    presets: tuple[str, ...] = _EXACT
    module: str = 'backbone'
    amp: str = 'fp16'
    batch: int = 2
    size: tuple[int, int] = (800, 1344)
    boxes: int = 60
    rounds: int = 20
    channels_last: bool = False
    cap: int | None = None
    options: dict = dataclasses.field(default_factory=dict)
    counted: str = ''
    times: str = ''
    issue: str = ''

    @property
    def rows(self) -> tuple[str, ...]:
        """Names of its rows."""
        return tuple(f'{self.name}/{preset}' for preset in self.presets)

    def rehearsed(self) -> 'Trial':
        """Return the same trial with a tiny size, for a CPU."""
        config = SHAPES if self.config.startswith((_OURS, CONVNEXT_V2)) else self.config.replace('vit-b', 'vit-t')
        options = {**({} if config == SHAPES else self.options), **_TINY.get(config, {})}
        presets = tuple(dict.fromkeys(name for name in (self.presets[0], 'exact') if name in self.presets))
        tiny = dict(
            presets=presets if presets != ('none',) else self.presets[:2],
            amp='bf16' if self.amp == 'fp16' else self.amp,
            batch=2,
            size=(64, 64),
            boxes=8,
            rounds=min(self.rounds, 1),
            cap=None,
        )
        return dataclasses.replace(self, config=config, options=options, **tiny)


# Each kind of changed module beside its own code.
_VERIFIED = dict(presets=('exact', 'int8'), size=(512, 512), boxes=5)
FAMILIES = (
    Trial('ResNet', R50, **_VERIFIED),
    Trial('CSPNeXt, RTMDet', RTMDET_S, **_VERIFIED),
    Trial('ConvNeXt', CONVNEXT_T, **_VERIFIED),
    Trial('Swin', SWIN_S, **_VERIFIED),
    Trial('DINO', DINO, **_VERIFIED),
    Trial('ViT', VIT.format('t'), **_VERIFIED),
    Trial('ConvNeXt V2', CONVNEXT_V2, **_VERIFIED),
)
_R50 = dict(counted='Mask R-CNN R-50, fp16, 2 x 800 x 1344', times='r50_large', issue='ResNet-50')
_B = dict(counted='Cascade Mask R-CNN ConvNeXt-B, fp16, 2 x 800 x 1344', times='convnext_b_backbone', issue='ConvNeXt')
_ENCODER = dict(module='encoder', times='dino_encoder', issue="DINO's encoder")
MODULES = (
    Trial('R-50, fp16', R50, **_R50),
    Trial('R-50, fp16, channels last', R50, channels_last=True, **_R50),
    Trial('CSPNeXt-S, fp16, 8 x 640', RTMDET_S, batch=8, size=(640, 640), boxes=20, issue='CSPNeXt'),
    Trial('encoder of DINO, fp16', DINO, _ALL, rounds=12, **_ENCODER),
    Trial('encoder of DINO, fp32', DINO, _ALL, rounds=12, amp='off', **_ENCODER),
    Trial('ConvNeXt-B, fp16', CONVNEXT_B, _ALL, rounds=12, **_B),
    Trial('Swin-B, fp16', SWIN_S, _ALL, rounds=12, options=_SWIN_B, issue='Swin'),
)
_BLOCK = dict(presets=('none', 'exact', 'int8'))
BLOCKS = (
    Trial('R-50, second stage', R50, module='backbone.layer2', **_BLOCK),
    Trial('CSPNeXt-S, second stage', RTMDET_S, module='backbone.stage2', batch=8, size=(640, 640), **_BLOCK),
    Trial('layer of the encoder of DINO', DINO, module='encoder.layers.1', **_BLOCK),
    Trial('ConvNeXt-B, block of the first stage', CONVNEXT_B, module='backbone.stages.0.1', **_BLOCK),
    Trial('Swin-B, block of the first stage', SWIN_S, module='backbone.stages.0.blocks.1', options=_SWIN_B, **_BLOCK),
)
PROFILED = tuple(dataclasses.replace(trial, presets=_EXACT, counted='', times='', issue='') for trial in MODULES)
_STEP_R50 = Trial(
    'Mask R-CNN R-50, fp32', R50, rounds=10, counted='Mask R-CNN R-50, fp32, 2 x 800 x 1344', times='step_r50'
)
_STEP_B = Trial(
    'Cascade Mask R-CNN ConvNeXt-B, fp16', CONVNEXT_B, rounds=8, counted=_B['counted'], times='step_convnext_b'
)
STEPS = (
    _STEP_B,
    _STEP_R50,
    Trial(
        'RTMDet-S, fp32', RTMDET_S, batch=32, size=(640, 640), boxes=20, rounds=8,
        counted='RTMDet-S, fp32, 32 x 640 x 640', times='rtmdet_step',
    ),
    Trial('DINO R-50, fp32', DINO, rounds=8, counted='DINO R-50, fp32, 2 x 800 x 1344', times='dino_step'),
    Trial(
        'DINO-5scale Swin-L, fp32', DINO_SWIN_L, rounds=3, counted='DINO-5scale Swin-L, fp32, 2 x 800 x 1344',
    ),
)  # fmt: skip


def _capped(trial, cap):
    return dataclasses.replace(trial, name=f'{trial.name}, {cap} GiB', cap=cap, rounds=3, times='')


CAPS = (_capped(_STEP_R50, 3), _capped(_STEP_B, 5))
MORE_CAPS = (*(_capped(_STEP_R50, cap) for cap in (2, 4)), *(_capped(_STEP_B, cap) for cap in (4, 6, 8, 10)))
SYNC_BN = (Trial('Batch norm, and SyncBN of one process', '', ('none', 'SyncBN')),)
# Gradients under autocast of what stands nowhere above.
_ATTO = {'model.backbone.arch': 'atto', 'model.neck.in_channels': [40, 80, 160, 320]}
_SMOKE = dict(presets=(*_ALL, 'reference'), size=(256, 256), rounds=0)
SMOKE = (
    Trial('ViT-T', VIT.format('t'), **_SMOKE),
    Trial('ConvNeXt V2', CONVNEXT_V2, **{**_SMOKE, 'options': _ATTO}),
    Trial('decoder of DINO', DINO, module='decoder', **{**_SMOKE, 'options': {'model.num_queries': 50}}),
    Trial('neck of RTMDet', RTMDET_S, module='neck', **{**_SMOKE, 'presets': _EXACT}),
)
MORE_MODULES = (
    Trial('ViT-B, fp16', VIT.format('b'), _ALL, size=(1024, 1024)),
    Trial('R-50, fp32', R50, amp='off', counted='Mask R-CNN R-50, fp32, 2 x 800 x 1344', times='r50_large'),
    Trial('ConvNeXt-B, bf16', CONVNEXT_B, _ALL, amp='bf16', **_B),
    Trial('ConvNeXt-B, fp16, channels last', CONVNEXT_B, _ALL, channels_last=True, **_B),
)
RIVALS = tuple(
    Trial(f'ConvNeXt-T, {name}', CONVNEXT_T, ('none', name), rounds=10)
    for name in ('selective', 'save-on-cpu', 'compile', 'compile-0.5', 'compile-0.25', 'compile-0.1')
)
