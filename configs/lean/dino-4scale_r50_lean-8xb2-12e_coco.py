_base_ = ['mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py', '../_base_/lean.py']
