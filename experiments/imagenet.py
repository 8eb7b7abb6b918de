# Table 1 of the paper: ImageNet, top-1 accuracy in percent, memory in GB per GPU (the paper gives MB). The configs are
# configs/classification. They need mmpretrain and its training script, so nothing is run from here; logs of mmpretrain
# fill the table by `results_table.py --log`, without the check that they are a fair comparison.
configs = {
    'ViT-Tiny': None,
    'SBP ViT-Tiny': None,
    'ViT-Base': None,
    'SBP ViT-Base': None,
    'ConvNeXt-Tiny': None,
    'SBP ConvNeXt-Tiny': None,
    'ConvNeXt-Base': None,
    'SBP ConvNeXt-Base': None,
}
compare = {
    'SBP ViT-Tiny': 'ViT-Tiny',
    'SBP ViT-Base': 'ViT-Base',
    'SBP ConvNeXt-Tiny': 'ConvNeXt-Tiny',
    'SBP ConvNeXt-Base': 'ConvNeXt-Base',
}
seeds = [0]
gpus = 8
heads = ['memory', 'top-1']
paper = {
    'ViT-Tiny': [8.248, 73.68],
    'SBP ViT-Tiny': [5.587, 73.09],
    'ViT-Base': [10.083, 81.22],
    'SBP ViT-Base': [7.436, 80.62],
    'ConvNeXt-Tiny': [12.134, 82.1],
    'SBP ConvNeXt-Tiny': [7.059, 81.61],
    'ConvNeXt-Base': [14.130, 83.8],
    'SBP ConvNeXt-Base': [8.758, 83.27],
}
