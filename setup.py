import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

here = Path(__file__).parent
version = re.search(r"__version__ = '(.+)'", (here / 'sbp_mmdet/__init__.py').read_text()).group(1)


class BuildWithConfigs(build_py):
    """Build command that puts configs and tools where mim looks for them: ``sbp_mmdet/.mim``."""

    def run(self):
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, 'sbp_mmdet/.mim')
            ignore = shutil.ignore_patterns('__pycache__', 'quickstart*', 'gpu_*', 'run_tests*', 'setup_env*')
            for folder in ('configs', 'tools'):
                shutil.copytree(here / folder, target / folder, ignore=ignore, dirs_exist_ok=True)
            shutil.copy(here / 'model-index.yml', target)


setup(
    name='sbp_mmdet',
    version=version,
    description='Train the detectors of MMDetection in less GPU memory, with exact gradients or by SBP',
    long_description=(here / 'README.md').read_text(),
    long_description_content_type='text/markdown',
    author='The sbp_mmdet maintainers',
    url='https://arxiv.org/abs/2210.00129',
    license='Apache-2.0',
    license_files=['LICENSE'],
    keywords='object detection, instance segmentation, memory, activation checkpointing, stochastic backpropagation',
    classifiers=[
        'Development Status :: 4 - Beta',
        'Intended Audience :: Science/Research',
        'Operating System :: POSIX :: Linux',
        'Programming Language :: Python :: 3.10',
        'Programming Language :: Python :: 3.11',
        'Programming Language :: Python :: 3.12',
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
    ],
    packages=find_packages(include=['sbp_mmdet', 'sbp_mmdet.*']),
    cmdclass=dict(build_py=BuildWithConfigs),
    python_requires='>=3.10',
    # The mm stack is an extra, not a requirement: it comes under two sets of distribution names with the
    # same import names, and pip must never install one over the other.
    install_requires=['torch>=2.1'],
    extras_require={
        'onedl': ['onedl-mmcv>=2.3.6', 'onedl-mmengine>=0.10.12', 'onedl-mmdetection>=3.5.1', 'pycocotools'],
        'upstream': ['mmcv>=2.0.0,<2.2.0', 'mmengine>=0.10.4,<1.0', 'mmdet>=3.3.0,<4.0', 'pycocotools'],
        'safetensors': ['safetensors'],  # weights in .safetensors files
        'test': ['pytest', 'pytest-xdist', 'hypothesis', 'matplotlib', 'ruff', 'safetensors'],
    },
    entry_points={'console_scripts': ['sbp-mmdet = sbp_mmdet.plan.command:main']},
)
