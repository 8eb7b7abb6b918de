"""Loading of public weight files under the names of their source, from ``.pth`` and ``.safetensors``.

A backbone calls :func:`rename_weights` before it reads a state dict. A file's layout is told by its keys:

=========  ============================  ======================================================
family     layout                        a key that tells it
=========  ============================  ======================================================
convnext   mmpretrain (this package's)   stages.0.0.depthwise_conv.weight
convnext   original, DINOv3              stages.0.0.dwconv.weight
convnext   timm                          stages.0.blocks.0.conv_dw.weight
convnext   Hugging Face                  encoder.stages.0.layers.0.dwconv.weight
convnext   Hugging Face, DINOv3          stages.0.layers.0.depthwise_conv.weight
vit        timm, DeiT, MAE, DINOv2       blocks.0.attn.qkv.weight
vit        mmpretrain                    layers.0.attn.qkv.weight
vit        Hugging Face                  encoder.layer.0.attention.attention.query.weight
=========  ============================  ======================================================

Adding a layout is one :class:`Layout` in :data:`LAYOUTS`.
"""

import contextlib
import logging
import os
import re
from collections.abc import MutableMapping
from typing import NamedTuple

import torch
from mmengine.logging import MMLogger, print_log
from mmengine.runner.checkpoint import CheckpointLoader
from torch import Tensor, nn

__all__ = ['LAYOUTS', 'Layout', 'quiet', 'rename_weights']


class Layout(NamedTuple):
    """Naming scheme of the weights from one source.

    Attributes:
        name (str): Name in the log.
        key (str): A key that files of this layout have and others lack. A prefix of it in a file ('backbone.',
            'model.') is removed from all names.
        rules (tuple[tuple[str, str], ...]): Regular expressions and their replacements, applied in order. '{last}' is
            the number of the model's last stage.
    """

    name: str
    key: str
    rules: tuple[tuple[str, str], ...] = ()


_STAGE = r'^stages\.(\d+)\.'
_CONVNEXT_BLOCK = (
    (r'\.(dwconv|conv_dw)\.', '.depthwise_conv.'),
    (r'\.(pwconv1|mlp\.fc1)\.', '.pointwise_conv1.'),
    (r'\.(pwconv2|mlp\.fc2)\.', '.pointwise_conv2.'),
    (r'\.(layernorm|layer_norm)\.', '.norm.'),
    (r'\.layer_scale_parameter$', '.gamma'),
    (r'\.(mlp\.)?grn\.weight$', '.grn.gamma'),
    (r'\.(mlp\.)?grn\.bias$', '.grn.beta'),
)
# The norm after the classifier's pooling is that of the last stage's output, as mmpretrain has it.
_CONVNEXT_LAST = ((r'^(norm|norms\.{last}|layernorm|layer_norm|head\.norm)\.', 'norm{last}.'),)

LAYOUTS = {
    'convnext': (
        Layout('mmpretrain', 'stages.0.0.depthwise_conv.weight'),
        Layout('original', 'stages.0.0.dwconv.weight', _CONVNEXT_BLOCK + _CONVNEXT_LAST),
        Layout(
            'timm',
            'stages.0.blocks.0.conv_dw.weight',
            (
                (r'^stem\.', 'downsample_layers.0.'),
                (_STAGE + r'downsample\.', r'downsample_layers.\1.'),
                (_STAGE + r'blocks\.', r'stages.\1.'),
                *_CONVNEXT_BLOCK,
                *_CONVNEXT_LAST,
            ),
        ),
        Layout(
            'Hugging Face',
            'encoder.stages.0.layers.0.dwconv.weight',
            (
                (r'^embeddings\.patch_embeddings\.', 'downsample_layers.0.0.'),
                (r'^embeddings\.layernorm\.', 'downsample_layers.0.1.'),
                (r'^encoder\.', ''),
                (_STAGE + r'downsampling_layer\.', r'downsample_layers.\1.'),
                (_STAGE + r'layers\.', r'stages.\1.'),
                *_CONVNEXT_BLOCK,
                *_CONVNEXT_LAST,
            ),
        ),
        Layout(
            'Hugging Face, DINOv3',
            'stages.0.layers.0.depthwise_conv.weight',
            (
                (_STAGE + r'downsample_layers\.', r'downsample_layers.\1.'),
                (_STAGE + r'layers\.', r'stages.\1.'),
                *_CONVNEXT_BLOCK,
                *_CONVNEXT_LAST,
            ),
        ),
    ),
    'vit': (
        Layout('timm', 'blocks.0.attn.qkv.weight', ((r'^register_tokens$', 'reg_token'),)),
        Layout(
            'mmpretrain',
            'layers.0.attn.qkv.weight',
            (
                (r'^patch_embed\.projection\.', 'patch_embed.proj.'),
                (r'^ln1\.', 'norm.'),
                (r'^layers\.', 'blocks.'),
                (r'\.ln([12])\.', r'.norm\1.'),
                (r'\.ffn\.layers\.0\.0\.', '.mlp.fc1.'),
                (r'\.ffn\.layers\.1\.', '.mlp.fc2.'),
                (r'\.attn\.gamma1\.weight$', '.ls1.gamma'),
                (r'\.ffn\.gamma2\.weight$', '.ls2.gamma'),
            ),
        ),
        Layout(
            'Hugging Face',
            'encoder.layer.0.attention.attention.query.weight',
            (
                (r'^embeddings\.patch_embeddings\.projection\.', 'patch_embed.proj.'),
                (r'^embeddings\.position_embeddings$', 'pos_embed'),
                (r'^embeddings\.register_tokens$', 'reg_token'),
                (r'^embeddings\.', ''),
                (r'^layernorm\.', 'norm.'),
                (r'^encoder\.layer\.', 'blocks.'),
                (r'\.attention\.attention\.(query|key|value)\.', r'.attn.\1.'),
                (r'\.attention\.output\.dense\.', '.attn.proj.'),
                (r'\.layernorm_before\.', '.norm1.'),
                (r'\.layernorm_after\.', '.norm2.'),
                (r'\.intermediate\.dense\.', '.mlp.fc1.'),
                (r'\.output\.dense\.', '.mlp.fc2.'),
                (r'\.layer_scale([12])\.lambda1$', r'.ls\1.gamma'),
            ),
        ),
    ),
}
# Keys under which training scripts save the weights.
_NESTED = ('state_dict', 'model', 'teacher')


def rename_weights(module: nn.Module, state_dict: MutableMapping, prefix: str, family: str) -> str | None:
    """Rename and reshape the weights of a file to those of a backbone. Backbones call this before they read weights.

    Weights that are missing in the file, and weights that are left over, are logged in one line each. The latter keep
    their names, so that strict loading refuses them.

    Args:
        module (nn.Module): The backbone.
        state_dict (MutableMapping): Weights, changed in place.
        prefix (str): Prefix of the backbone's names: 'backbone.' in the weights of a detector, or ''.
        family (str): A key of :data:`LAYOUTS`.

    Returns:
        str | None: Name of the layout; ``None`` if no weight was renamed, because the names are the backbone's already
        or belong to no layout.
    """
    for outer in _NESTED:
        if not prefix and isinstance(state_dict.get(outer), dict):
            state_dict.update(state_dict.pop(outer))
    own = {name: value for name, value in module.state_dict().items()}
    names = [name for name in state_dict if name.startswith(prefix)]
    # Weights with the backbone's own names may belong to the other kind of layer (linear or 1x1 convolution).
    state_dict.update({name: _reshape_like(state_dict[name], own.get(name.removeprefix(prefix))) for name in names})
    match = _layout_of(names, prefix, family)
    if match is None or all(name.removeprefix(prefix) in own for name in names):
        if match is None and names and own and not any(name.removeprefix(prefix) in own for name in names):
            _log(module, f'the names of the weights, such as {names[0]!r}, belong to no known layout', logging.WARNING)
        return None
    layout, wrapper = match
    last = getattr(module, 'num_stages', 1) - 1
    rules = [(re.compile(p.replace('{last}', str(last))), r.replace('{last}', str(last))) for p, r in layout.rules]
    weights, left_over = {}, []
    for name in names:
        new = name.removeprefix(wrapper)
        for pattern, replacement in rules:
            new = pattern.sub(replacement, new)
        if not name.startswith(wrapper) or new in weights:
            left_over.append(name.removeprefix(prefix))
        else:
            weights[new] = state_dict.pop(name)
    _join_qkv(weights)
    left_over += [name for name in weights if name not in own]
    state_dict.update({prefix + name: _reshape_like(value, own.get(name)) for name, value in weights.items()})
    missing = [name for name in own if name not in weights]
    _log(module, f'weights with the names of {layout.name}: {len(own) - len(missing)} of {len(own)} found')
    for what, which in (('missing in the file', missing), ('left over in the file', left_over)):
        if which:
            _log(module, f'{what}: {_format_names(which)}', logging.WARNING)
    return layout.name


def _layout_of(names, prefix, family):
    """Return the layout of a file, and the prefix of all of its names."""
    for layout in LAYOUTS[family]:
        keys = [name for name in names if name == prefix + layout.key or name.endswith('.' + layout.key)]
        wrappers = [name.removesuffix(layout.key) for name in keys]
        if wrappers:
            return layout, min(wrappers, key=len)
    return None


def _join_qkv(weights):
    """Join the matrices of queries, keys and values that a file has separately."""
    for name in [name for name in weights if '.attn.query.' in name]:
        parts = [name.replace('.query.', f'.{part}.') for part in ('query', 'key', 'value')]
        if all(part in weights for part in parts):
            weights[name.replace('.query.', '.qkv.')] = torch.cat([weights.pop(part) for part in parts])


def _reshape_like(value, own):
    """Reshape weights between linear layers and 1x1 convolutions; other shapes stay, and are refused later."""
    if not (isinstance(value, Tensor) and isinstance(own, Tensor)) or value.shape == own.shape:
        return value  # not a copy, for load_state_dict(assign=True)
    squeezed = [tuple(size for size in t.shape if size != 1) for t in (value, own)]
    return value.reshape(own.shape) if squeezed[0] == squeezed[1] else value


def _format_names(names):
    """Return up to six names, and the number of the others."""
    return ', '.join(names[:6]) + (f' and {len(names) - 6} more' if len(names) > 6 else '')


def _log(module, text, level=logging.INFO):
    print_log(f'{type(module).__name__}: {text}', logger='current', level=level)


@contextlib.contextmanager
def quiet():
    """Silence messages about single parameters while a model starts or loads."""
    logger = MMLogger.get_current_instance()
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


# mmengine tries regular expressions in reverse alphabetical order, so the second precedes its own 'https://'. It logs
# the name of the function.
@CheckpointLoader.register_scheme(prefixes=[r'.*\.safetensors$', r'https?://.*\.safetensors$'], force=True)
def load_from_safetensors(filename: str, map_location=None) -> dict[str, Tensor]:
    """Load weights for mmengine's ``init_cfg`` and ``load_from`` from a .safetensors file.

    Args:
        filename (str): Path of the file.
        map_location (str | torch.device | None): Device of the weights. If ``None``, the CPU. Default: None.

    Returns:
        dict[str, Tensor]: The weights by name.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the package safetensors is missing, or the file cannot be read.
    """
    if filename.startswith(('http://', 'https://')):
        raise ValueError(f'{filename}: download the file and give its path; .safetensors files are read from disk only')
    filename = os.path.expanduser(filename)
    if not os.path.isfile(filename):
        raise FileNotFoundError(f'{filename} does not exist; check the path')
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise ValueError(f'{filename}: reading it needs the package safetensors: pip install safetensors') from error
    device = map_location if isinstance(map_location, (str, torch.device)) else 'cpu'
    try:
        return load_file(filename, device=str(device))
    except SafetensorError as error:
        raise ValueError(f'{filename} cannot be read, it may be cut off; download it again: {error}') from error
