_base_ = ['mmdet::mask2former/mask2former_swin-t-p4-w7-224_8xb2-lsj-50e_coco.py', '../_base_/lean.py']
