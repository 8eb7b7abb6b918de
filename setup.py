import re
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
version = re.search(r"__version__ = '(.+)'", (here / 'sbp_mmdet/__init__.py').read_text()).group(1)

setup(
    name='sbp_mmdet',
    version=version,
    description='Memory-efficient training of detectors in MMDetection by Stochastic Backpropagation',
    long_description=(here / 'README.md').read_text(),
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    license_files=['LICENSE'],
    classifiers=['Programming Language :: Python :: 3', 'Topic :: Scientific/Engineering :: Artificial Intelligence'],
    packages=find_packages(include=['sbp_mmdet', 'sbp_mmdet.*']),
    python_requires='>=3.10',
    # The mm stack is an extra, not a requirement: it comes under two sets of distribution names with the
    # same import names, and pip must never install one over the other.
    install_requires=['torch>=2.1'],
    extras_require={
        'onedl': ['onedl-mmcv>=2.3.6', 'onedl-mmengine>=0.10.12', 'onedl-mmdetection>=3.5.1', 'pycocotools'],
        'upstream': ['mmcv>=2.0.0,<2.2.0', 'mmengine>=0.10.4,<1.0', 'mmdet>=3.3.0,<4.0', 'pycocotools'],
        'safetensors': ['safetensors'],  # weights in .safetensors files
        'test': ['pytest', 'hypothesis', 'matplotlib', 'ruff', 'safetensors'],
    },
    entry_points={'console_scripts': ['sbp-mmdet = sbp_mmdet.plan.command:main']},
)
