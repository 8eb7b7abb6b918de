# Table 1 of the paper: ImageNet, 300 epochs, top-1 accuracy in percent, memory per GPU (the paper gives MB). The
# configs are mmpretrain's children and run with its own training script: pip install mmpretrain torchvision.
configs = {
    'ViT-Tiny': '../../configs/classification/vit-tiny_in1k.py',
    'SBP ViT-Tiny': '../../configs/classification/sbp-vit-tiny_in1k.py',
    'ViT-Base': '../../configs/classification/vit-base_in1k.py',
    'SBP ViT-Base': '../../configs/classification/sbp-vit-base_in1k.py',
    'ConvNeXt-Tiny': '../../configs/classification/convnext-tiny_in1k.py',
    'SBP ConvNeXt-Tiny': '../../configs/classification/sbp-convnext-tiny_in1k.py',
    'ConvNeXt-Base': '../../configs/classification/convnext-base_in1k.py',
    'SBP ConvNeXt-Base': '../../configs/classification/sbp-convnext-base_in1k.py',
}
compare = {
    'SBP ViT-Tiny': 'ViT-Tiny',
    'SBP ViT-Base': 'ViT-Base',
    'SBP ConvNeXt-Tiny': 'ConvNeXt-Tiny',
    'SBP ConvNeXt-Base': 'ConvNeXt-Base',
}
# As mmpretrain's --amp and --auto-scale-lr: mixed precision, a learning rate for the images of a step.
options = {
    'optim_wrapper.type': 'AmpOptimWrapper',
    'auto_scale_lr.enable': True,
}
seeds = [0]
gpus = 8
heads = ['memory', 'top-1']
paper = {
    'ViT-Tiny': [8248 / 1024, 73.68],
    'SBP ViT-Tiny': [5587 / 1024, 73.09],
    'ViT-Base': [10083 / 1024, 81.22],
    'SBP ViT-Base': [7436 / 1024, 80.62],
    'ConvNeXt-Tiny': [12134 / 1024, 82.1],
    'SBP ConvNeXt-Tiny': [7059 / 1024, 81.61],
    'ConvNeXt-Base': [14130 / 1024, 83.8],
    'SBP ConvNeXt-Base': [8758 / 1024, 83.27],
}
