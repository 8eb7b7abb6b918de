"""Faults of operations for the tests of verification: a right line, a wrong line, and a model that runs it."""

import inspect
import sys
import textwrap
from typing import NamedTuple

from sbp_mmdet.ops.common.autograd_function import Operation

__all__ = ['FAULTS', 'IN_HALF', 'Fault', 'plant']

OPS = 'sbp_mmdet.ops'


class Fault(NamedTuple):
    """Faulty line of code.

    Attributes:
        where (str): Module below ``sbp_mmdet.ops``, and function or method, such as 'common.folding:fold'.
        right (str): Text that occurs exactly once in the function.
        wrong (str): Text that replaces it.
        model (str): Key of ``verify_models.MODELS``.
        preset (str): Preset with which the line runs. Default: 'exact'.
    """

    where: str
    right: str
    wrong: str
    model: str
    preset: str = 'exact'


def plant(monkeypatch, fault: Fault) -> None:
    """Replace a line of a function everywhere in the package where the function is referenced."""
    module, _, name = fault.where.partition(':')
    module = sys.modules[f'{OPS}.{module}']
    *owners, name = name.split('.')
    owner = module
    for part in owners:
        owner = getattr(owner, part)
    original = inspect.getattr_static(owner, name)
    text = textwrap.dedent(inspect.getsource(getattr(original, '__func__', original)))
    assert text.count(fault.right) == 1, f'{fault.where} has {fault.right!r} {text.count(fault.right)} times'
    names = {}
    exec(compile(text.replace(fault.right, fault.wrong), f'<{fault.where}>', 'exec'), vars(module), names)
    faulty = names[name]
    monkeypatch.setattr(owner, name, faulty)
    if owners:
        return
    for other in [m for key, m in sys.modules.items() if key.startswith('sbp_mmdet')]:
        for key, value in [*vars(other).items()]:
            if value is original:
                monkeypatch.setattr(other, key, faulty)
            for pair in ('forward', 'backward') if isinstance(value, Operation) else ():
                if getattr(value, pair) is original:
                    monkeypatch.setattr(value, pair, faulty)


ROUND = ('common.precision:_rounded', '(rows / unit).round_()')
FAULTS = {
    # Eight bits.
    'int8: step too large': Fault(
        'common.precision:store',
        'x, divisor), scale)',
        'x, divisor), scale * 1.03)',
        'ConvNeXt',
        'int8',
    ),
    'int8: floor': Fault(*ROUND, '(rows / unit).floor_()', 'ConvNeXt', 'int8'),
    'int8: truncation': Fault(*ROUND, '(rows / unit).trunc_()', 'Swin', 'int8'),
    'int8: four bits': Fault(*ROUND, '(rows / unit / 16).round_() * 16', 'ViT', 'int8'),
    'int8 map: one step for all images': Fault(
        'common.eight_bits:quantise_positive',
        'step = x.amax((2, 3), keepdim=True)',
        'step = x.amax((0, 2, 3), keepdim=True)',
        'ResNet',
        'int8',
    ),
    'int8: clipped': Fault(*ROUND, '(rows / unit).clamp_(-40, 40).round_()', 'ConvNeXt', 'int8'),
    'int8 map: end of the step': Fault(
        'common.kept_maps:KeptMap._steps', '126.5 * self.unit', '127 * self.unit', 'ResNet', 'int8'
    ),
    'int8 map: half of the steps': Fault(
        'common.eight_bits:quantise_positive',
        '(x / divisor).ceil_()',
        '(x / divisor / 2).ceil_().mul_(2)',
        'ResNet',
        'int8',
    ),
    'int8 map: threshold': Fault(
        'common.eight_bits:quantise',
        'torch.addcmul(threshold, lowest',
        'torch.addcmul(0 * threshold, lowest',
        'ResNet in training mode',
        'int8',
    ),
    'int8 map: lowest': Fault('common.eight_bits:quantise', 'alpha=127)', 'alpha=120)', 'ConvModules', 'int8'),
    # The fold of norms into layers.
    'fold: bias of the norm': Fault('common.folding:fold_bias', 'if norm_bias is None:', 'if True:', 'Swin'),
    'fold: weight of the norm': Fault(
        'common.folding:fold_weight', 'dtype) if norm_weight is None else', 'dtype) if True else', 'Swin'
    ),
    'unfold: weight of the norm': Fault('common.folding:unfold', 'else (dw * weight).sum(0)', 'else dw.sum(0)', 'Swin'),
    'unfold: bias of the norm': Fault(
        'common.folding:unfold', 'dw if norm_bias is None else torch.addr', 'dw if True else torch.addr', 'Swin'
    ),
    'MLP: layer scale': Fault(
        'channel_mlp_backward:BackwardPass._gradients', '(gamma, total, cast', '(gamma, 0 * total, cast', 'ConvNeXt'
    ),
    'MLP: weight behind the layer scale': Fault(
        'channel_mlp_backward:BackwardPass.__init__', 't.weight2 * self.column', 't.weight2', 'ConvNeXt'
    ),
    'MLP: statistics of the norm': Fault(
        'common.layer_norms:TokenNorm.backward', '*statistics, self', 'statistics[0], statistics[1] / 2, self', 'ViT'
    ),
    'MLP: hidden layer': Fault(
        'channel_mlp_backward:BackwardPass._add_through_layers',
        'F.gelu(sampled.take(hidden), approximate=approximate)',
        'F.relu(sampled.take(hidden))',
        'Swin',
    ),
    'norm: affine part of the saved x-hat': Fault(
        'common.layer_norms:TokenNorm.scale',
        'addcmul(self.bias, xhat, self.weight)\n',
        'add(self.bias, xhat)\n',
        'Swin',
        'int8',
    ),
    'norm: deviation': Fault('common.folding:normalise_backward', 'dx.mul_(rstd)', 'dx', 'Swin'),
    'fixed norm: epsilon': Fault(
        'common.fixed_norms:_factors',
        '[s.eps for s, _ in layers]',
        '[0.0 for _ in layers]',
        'ResNet with small variances',
    ),
    'fixed norm: mean': Fault('common.fixed_norms:_shift', 'scale, value=-1)', 'scale, value=0)', 'ResNet'),
    'fixed norm: gradient': Fault(
        'common.fixed_norms:gradients_of_fixed', 'centres, value=-1)', 'centres, value=0)', 'ResNet'
    ),
    # Global response normalisation.
    'GRN: mean of the norms': Fault(
        'channel_mlp_grn:_Response.backward',
        ' - (dn * self.norm).mean(1, keepdim=True) / self.mean.square()',
        '',
        'ConvNeXt V2',
    ),
    'GRN: response in the backward pass': Fault(
        'channel_mlp_grn:_hidden_gradient',
        'da = da.add_(_by_image(chunk, a) * through[images].unsqueeze(1))',
        '',
        'ConvNeXt V2',
    ),
    'GRN: weight': Fault(
        'channel_mlp_grn:_backward', '(sums.responses * response.relative)', 'sums.responses', 'ConvNeXt V2'
    ),
    'GRN: bias': Fault('channel_mlp_grn:_add_second_layer', 'column_sums(du)', 'column_sums(du * a)', 'ConvNeXt V2'),
    'GRN: norm of another image': Fault(
        'channel_mlp_grn:_add_second_layer', 'response.scale[chunk.images]', 'response.scale[:1]', 'ConvNeXt V2'
    ),
    # Feed-forward networks.
    'FFN: activation': Fault('ffn:FeedForward.backward', 'act(sampled.take(hidden))', 'sampled.take(hidden)', 'FFN'),
    'FFN: derivative': Fault(
        'ffn:FeedForward.backward',
        'act.backward(grad if factor is None else grad.mul_(factor), hidden, inplace=True)',
        'grad',
        'FFN',
    ),
    'FFN: dropout of the hidden layer': Fault(
        'ffn:FeedForward.backward', 'grad.mul_(factor)', 'grad', 'FFN with dropout'
    ),
    'FFN: dropout of the output': Fault('ffn:FeedForward.backward', 'if second:', 'if False:', 'FFN with dropout'),
    'FFN: random numbers of another step': Fault(
        'ffn:replay_dropout', 'if state is None:', 'if True:', 'FFN with dropout'
    ),
    # A convolution that runs again.
    'rerun: bias': Fault('common.rerun_conv:_run', 'cast(bias, s.dtype)', '0 * bias', 'ConvNeXt'),
    'rerun: stored input': Fault(
        'common.rerun_conv:convolve',
        'return out, Conv(Stored(x)',
        'return out, Conv(Stored(x.relu())',
        'ConvNeXt',
    ),
    'rerun: gradient of the input': Fault(
        'common.rerun_conv:_backward',
        'return _Gradients(dx,',
        'return _Gradients(dx.roll(1, 3),',
        'ConvNeXt',
        'int8',
    ),
    # Deformable attention.
    'deformable: output': Fault(
        'deformable_attention:_attention_backward',
        'attended.load(s.dtype)',
        'attended.load(s.dtype).relu()',
        'attention',
    ),
    'deformable: padding': Fault(
        'deformable_attention:kernel_inputs', 't.key_padding_mask is not None', 'False', 'padded attention'
    ),
    'deformable: offsets': Fault(
        'deformable_attention:_scale_offsets', 't.spatial_shapes.flip(1)', 't.spatial_shapes', 'attention'
    ),
    'deformable: gradient of the locations': Fault(
        'deformable_attention:_images_backward',
        'dlocations = dlocations.to(',
        'dlocations = 0.9 * dlocations.to(',
        'attention',
    ),
    'deformable: position of the query': Fault(
        'deformable_attention:kernel_inputs', 't.x if t.query_pos is None else', 't.x if True else', 'encoder'
    ),
    # Window attention.
    'windows: position bias': Fault(
        'window_attention:_Windows.backward', 'dbias = dscores.view(', 'dbias = dsoftmax.view(', 'Swin'
    ),
    'windows: scale': Fault(
        'window_attention:_Windows.backward', 'k, beta=0, alpha=scale', 'k, beta=0, alpha=1', 'Swin'
    ),
    'windows: deviation of the saved x-hat': Fault(
        'window_attention:_backward', 'torch.addcmul(grad, dx, saved.rstd)', 'grad + dx', 'Swin', 'int8'
    ),
    'windows: padding in the forward pass': Fault(
        'window_attention:_Windows.run', 'if pads is not None:', 'if False:', 'Swin'
    ),
    'windows: padding in the backward pass': Fault(
        'window_attention:_backward', 'g = windows.without_padding_(', 'g = (', 'Swin'
    ),
    'windows: regions': Fault(
        'window_attention:_Windows.run', 'if at_edge and layout.apart is not None:', 'if False:', 'Swin'
    ),
    'windows: keys for queries': Fault(
        'window_attention:_Windows.backward', 'dscores.mT, q, beta', 'dscores.mT, k, beta', 'Swin'
    ),
    # The chain of residual blocks.
    'chain: signs': Fault('common.sign_bits:_bits_of', '.bool()', '.logical_not()', 'ResNet-50'),
    'chain: shortcut in the second run': Fault('residual_block:rerun_output', 'out.add_(x)', 'out', 'ResNet-50'),
    'chain: ReLU in the second run': Fault(
        'residual_block:rerun_output', 'block.signs.relu_(saved.output, out)', 'out', 'ResNet-50'
    ),
    'chain: mask of a ReLU': Fault(
        'residual_chain:_backward',
        'aten.threshold_backward.default(grad, x, 0) if n > 0 else grad',
        'grad',
        'ResNet-50',
    ),
    'chain: gradient of the shortcut': Fault(
        'residual_block:block_backward', 'return inner.add_(grad) if needs_x', 'return inner if needs_x', 'ResNet-50'
    ),
    'chain: layer kept': Fault(
        'residual_block:_keep_input',
        'scale=scale, shift=shift',
        'scale=scale, shift=0 * shift',
        'ResNet-50 in training mode',
    ),
    'chain: layer kept in eight bits': Fault(
        'residual_block:_keep_input',
        '_replace(scale=scale, shift=shift,',
        '_replace(scale=scale, shift=-shift,',
        'ResNet-50 in training mode',
        'int8',
    ),
    # CSP layers.
    'CSP: shortcut in the second run': Fault(
        'csp_backward:CSPBackward._block_inputs',
        'out.add_(past) if self._is_new(stop - 1) else out + past',
        'out',
        'CSP layer',
    ),
    'CSP: gradient of the shortcut': Fault(
        'csp_backward:CSPBackward._blocks_backward', 'grad.add_(past) if adds else grad', 'grad', 'CSP layer'
    ),
    'CSP: activation in front of a layer': Fault(
        'csp_backward:CSPBackward._blocks_backward', 'self.layers[i - 1].s.activation(below)', 'below', 'CSP layer'
    ),
    'CSP: order of the halves': Fault(
        'csp_backward:CSPBackward._whole_backward',
        'torch.cat((self._layer_output(last - 1) if out is None else out, self._layer_output(0)), 1)',
        'torch.cat((self._layer_output(0), self._layer_output(last - 1) if out is None else out), 1)',
        'CSP layer',
    ),
    'CSP: gradient of the halves': Fault(
        'csp_backward:CSPBackward._whole_backward', 'grad, past = grad', 'past, grad = grad', 'CSP layer'
    ),
    'CSP: input of the last layer': Fault(
        'csp_backward:CSPBackward._whole_backward', 'whole if gate is None else whole * gate', 'whole', 'CSP layer'
    ),
    'CSP: mean of the attention': Fault(
        'csp_backward:CSPBackward._attention_backward', '.add_(dpooled', '.add_(0 * dpooled', 'CSP layer'
    ),
    'CSP: norms computed together': Fault(
        'residual_layer:affines_of_norms',
        'cast(rstd, accumulator(rstd)) * torch.cat',
        'rstd + 0 * torch.cat',
        'CSP layer',
    ),
    'CSP: recomputed convolution': Fault(
        'csp_backward:CSPBackward._block_inputs',
        'self._layer_output(i - 1) if i > start',
        'self._layer_output(start - 1) if i > start',
        'CSP layer',
        'exact_min',
    ),
    'CSP: threshold in eight bits': Fault(
        'csp_layer:_Forward._layer',
        'zero_of(scale, shift)',
        '1 + zero_of(scale, shift)',
        'CSP layer with LeakyReLU',
        'int8',
    ),
    # Fusion of image and text, and attention with decomposed positions.
    'decomposed: shortcut': Fault(
        'decomposed_attention:_backward',
        'torch.add(grad[where], branch',
        'torch.add(0 * grad[where], branch',
        'ViTDet',
    ),
    'decomposed: sums': Fault(
        'decomposed_attention:_backward', 'sums[name] += gradient', 'sums[name] = gradient', 'ViTDet'
    ),
    'fusion: rows of the second softmax': Fault('bi_attention:_rows_backward', '- delta[n, :, None]', '', 'fusion'),
    'fusion: keys of an image': Fault(
        'bi_attention:_rows_backward', 'dkey[n] += gradients[1]', 'dkey[0] += gradients[1]', 'fusion'
    ),
}
# Lines that run in half precision only.
IN_HALF = {
    'windows: folded scale': Fault(
        'window_attention:_Layers.gradients', 'weight.mul_(self.scales[:, None])', 'weight', 'Swin'
    ),
}
