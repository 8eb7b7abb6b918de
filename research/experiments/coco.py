# Table 2 of the paper: COCO, 36 epochs, 8 GPUs with 2 images each. `paper` holds its figures (memory in GB per GPU).
configs = {
    'Mask R-CNN, ConvNeXt-T': '../../configs/sbp_convnext/mask-rcnn_convnext-t_fpn_amp-ms-crop-3x_coco.py',
    'Mask R-CNN, SBP ConvNeXt-T': '../../configs/sbp_convnext/mask-rcnn_sbp-convnext-t_fpn_amp-ms-crop-3x_coco.py',
    'Cascade Mask R-CNN, ConvNeXt-B': (
        '../../configs/sbp_convnext/cascade-mask-rcnn_convnext-b_fpn_4conv1fc-giou_amp-ms-crop-3x_coco.py'
    ),
    'Cascade Mask R-CNN, SBP ConvNeXt-B': (
        '../../configs/sbp_convnext/cascade-mask-rcnn_sbp-convnext-b_fpn_4conv1fc-giou_amp-ms-crop-3x_coco.py'
    ),
}
compare = {
    'Mask R-CNN, SBP ConvNeXt-T': 'Mask R-CNN, ConvNeXt-T',
    'Cascade Mask R-CNN, SBP ConvNeXt-B': 'Cascade Mask R-CNN, ConvNeXt-B',
}
seeds = [0]
gpus = 8
heads = ['memory', 'box AP', 'box AP50', 'box AP75', 'mask AP', 'mask AP50', 'mask AP75']
paper = {
    'Mask R-CNN, ConvNeXt-T': [8.6, 46.2, 67.9, 50.8, 41.7, 65.0, 44.9],
    'Mask R-CNN, SBP ConvNeXt-T': [5.9, 45.5, 67.4, 50.1, 41.1, 64.4, 44.1],
    'Cascade Mask R-CNN, ConvNeXt-B': [17.4, 52.7, 71.3, 57.2, 45.6, 68.9, 49.5],
    'Cascade Mask R-CNN, SBP ConvNeXt-B': [12.5, 52.5, 71.3, 57.2, 45.4, 68.7, 49.2],
}
