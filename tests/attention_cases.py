"""Inputs of the attention layer, and the layer by the appendix's equations in plain torch."""

import torch
import torch.nn.functional as F
from ops_cases import plain_norm

from sbp_mmdet.masks import Positions, positions
from sbp_mmdet.ops.tokens import token_positions

HEADS = 3
NAMES = ('norm_weight', 'norm_bias', 'qkv_weight', 'qkv_bias', 'proj_weight', 'proj_bias', 'gamma')


def attention_inputs(seed=0, n=2, tokens=21, c=12, *, dtype=torch.float64, bias=True, affine=True, gamma=True):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, mean=0.0, std=1.0):
        return (mean + std * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)

    return dict(
        x=normal(n, tokens, c),
        norm_weight=normal(c, mean=1.0, std=0.3) if affine else None,
        norm_bias=normal(c, std=0.3) if affine else None,
        qkv_weight=normal(3 * c, c, std=1.5 * c**-0.5),
        qkv_bias=normal(3 * c, std=0.3) if bias else None,
        proj_weight=normal(c, c, std=c**-0.5),
        proj_bias=normal(c, std=0.3),
        gamma=normal(c, mean=1.0, std=0.3) if gamma else None,
    )


def grid(kind, height=4, width=5, prefix=1, *, nearest=False, images=0):
    """Kept tokens: a share of a grid and, in front, tokens that are always kept. Some images: a mask for each."""
    if kind is None:
        return None
    share = {'empty': 0.0, 'full': 1.1, 'few': 0.2, 'half': 0.5}[kind]
    if images:
        # As many kept in each image.
        count = max(round(share * height * width), 1)
        each = []
        for i in range(images):
            order = torch.randperm(height * width, generator=torch.Generator().manual_seed(i))
            each.append(positions((order < count).view(height, width)))
        found = Positions(torch.stack([p.keep for p in each]), torch.stack([p.drop for p in each]))
        return token_positions(found, prefix)
    mask = torch.rand(height, width, generator=torch.Generator().manual_seed(7)) < share
    return token_positions(positions(mask, nearest=nearest), prefix)


def plain_attention(
    x, nw, nb, qkv_weight, qkv_bias, proj_weight, proj_bias, gamma, *, mode, keep=None, heads=None, factor=None
):
    """Every equation of the appendix as it stands; what is dropped is detached, entry by entry of the map."""
    n, tokens, c = x.shape
    kept = torch.ones(n, tokens, dtype=torch.bool)
    if keep is not None:
        kept = torch.zeros(n, tokens, dtype=torch.bool)
        kept.scatter_(1, keep.keep.expand(n, -1), True)
    q, k, v = F.linear(plain_norm(x, nw, nb), qkv_weight, qkv_bias).view(n, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
    scores = q @ k.transpose(2, 3) / (c // HEADS) ** 0.5
    if mode == 'qkv':
        keys = kept[:, None, None, :]
        scores = torch.where(keys, scores, scores.detach())
        v = torch.where(keys.mT, v, v.detach())
    out = scores.softmax(-1).to(v.dtype) @ v
    parts = torch.einsum('nhtd,chd->nhtc', out, proj_weight.view(c, HEADS, -1).to(out.dtype))
    if gamma is not None:
        parts, proj_bias = parts * gamma, proj_bias * gamma
    if mode == 'head' and heads is not None:
        chosen = torch.zeros(HEADS, dtype=torch.bool)
        chosen[heads] = True
        parts = torch.where(chosen[:, None, None], parts, parts.detach())
    branch = parts.sum(1) + proj_bias
    branch = branch if factor is None else branch * factor[:, None, None]
    return x + torch.where(kept[..., None], branch, branch.detach())


def pooled_gradients(tensors, keep, mode, grad, own=False):
    """Gradients where dropped tokens are taken for the kept ones they go with, with all rows written out.

    A dropped token borrows its kept one's x-hat, query, key, value, output and statistics; each gets its group's mean
    gradient (``own``: its own). For 'query' it borrows query, output and statistics alone.
    """
    x, nw, nb, w, b, wp, bp, gamma = tensors.values()
    n, tokens, c = x.shape
    lender = torch.arange(tokens)
    lender[keep.drop] = keep.keep[keep.nearest.index]
    mean, var = x.mean(-1, keepdim=True), x.var(-1, correction=0, keepdim=True)
    xhat, rstd = (x - mean) * (var + 1e-6).rsqrt(), (var + 1e-6).rsqrt()

    def heads(rows):
        return rows.view(n, tokens, HEADS, -1).transpose(1, 2)

    def rows(heads):
        return heads.transpose(1, 2).flatten(2)

    q, k, v = (heads(part) for part in F.linear(xhat * nw + nb, w, b).chunk(3, -1))
    scale = (c // HEADS) ** -0.5
    scores = q @ k.mT * scale
    lse, out = scores.logsumexp(-1, keepdim=True), scores.softmax(-1) @ v
    q, lse, out = (part[:, :, lender] for part in (q, lse, out))
    if mode == 'qkv':
        xhat, rstd, k, v = xhat[:, lender], rstd[:, lender], k[:, :, lender], v[:, :, lender]
    if not own:
        sizes = torch.zeros(tokens, dtype=x.dtype).index_add_(0, lender, torch.ones(tokens, dtype=x.dtype))
        means = torch.zeros_like(grad).index_add_(1, lender, grad) / sizes.clamp_min(1)[:, None]
        g = means[:, lender]
    else:
        g = grad
    dout = heads((g * gamma) @ wp)
    softmax = (q @ k.mT * scale - lse).exp()
    ds = softmax * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * scale
    dy = torch.cat([rows(ds @ k), rows(ds.mT @ q), rows(softmax.mT @ dout)], -1)
    y = (xhat * nw + nb).flatten(0, 1)
    dn = dy @ w
    dxhat = dn * nw
    dx = (dxhat - dxhat.mean(-1, keepdim=True) - xhat * (dxhat * xhat).mean(-1, keepdim=True)) * rstd
    outer = g.flatten(0, 1).T @ rows(out).flatten(0, 1)
    return dict(
        x=grad + dx,
        norm_weight=(dn * xhat).sum((0, 1)),
        norm_bias=dn.sum((0, 1)),
        qkv_weight=dy.flatten(0, 1).T @ y,
        qkv_bias=dy.sum((0, 1)),
        proj_weight=gamma[:, None] * outer,
        proj_bias=gamma * grad.sum((0, 1)),
        gamma=(outer * wp).sum(1) + bp * grad.sum((0, 1)),
    )
