"""A text encoder without download, in place of BERT in Grounding DINO: as wide, with random weights."""

import torch
from mmdet.models.language_models.bert import generate_masks_with_special_tokens_and_transfer_map
from mmdet.registry import MODELS
from torch import Tensor, nn

__all__ = ['TextStandIn', 'WordTokenizer']


class Tokens(dict):
    """Ids of the words of some captions, with the methods of a tokenizer's output that mmdet calls."""

    def __init__(self, ids: Tensor, mask: Tensor, spans: list[list[tuple[int, int]]]):
        super().__init__(input_ids=ids, attention_mask=mask, token_type_ids=torch.zeros_like(ids))
        self.spans = spans

    def __getattr__(self, name):
        return self[name]

    def char_to_token(self, char: int) -> int | None:
        """Return the index of the token that a character of the first caption belongs to."""
        return next((i for i, (start, end) in enumerate(self.spans[0]) if start <= char < end), None)

    def to(self, device) -> 'Tokens':
        """Move the ids to a device."""
        return Tokens(self.input_ids.to(device), self.attention_mask.to(device), self.spans)


class WordTokenizer:
    """Tokenizer that makes a token of each word and of each full stop.

    Args:
        words (int): Size of the vocabulary. Default: 1000.
    """

    special = (1, 2, 3)  # of the beginning, the end, and a full stop

    def __init__(self, words: int = 1000):
        self.words = words

    def __call__(self, captions: list[str], max_length: int = 256, **kwargs) -> Tokens:
        """Return the tokens of captions, padded to the longest; further arguments are those of a tokenizer."""
        rows, spans = [], []
        for caption in captions:
            ids, where, start = [1], [(-1, -1)], 0
            for word in caption.replace('.', ' . ').split():
                start = caption.index(word, start)
                ids.append(3 if word == '.' else 4 + sum(map(ord, word)) % (self.words - 4))
                where.append((start, start + len(word)))
                start += len(word)
            rows.append([*ids[: max_length - 1], 2])
            spans.append(where[: max_length - 1])
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        return Tokens(ids, (ids != 0).long(), spans)

    batch_encode_plus = __call__


class _Body(nn.Module):
    def __init__(self, words, width, depth, heads):
        super().__init__()
        self.language_dim = width
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, 'gelu', batch_first=True) for _ in range(depth)
        )
        self.heads = heads

    def forward(self, ids, mask):
        x = self.embedding(ids)
        mask = ~mask.repeat_interleave(self.heads, 0)
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return x


@MODELS.register_module()
class TextStandIn(nn.Module):
    """Encoder of captions with the interface of mmdet's ``BertModel``.

    Args:
        width, depth, heads (int): Those of a transformer encoder. Default: those of BERT-base.
        max_tokens (int): Number of tokens of the longest caption. Default: 256.
    """

    pad_to_max = False

    def __init__(self, width: int = 768, depth: int = 12, heads: int = 12, max_tokens: int = 256):
        super().__init__()
        self.tokenizer, self.max_tokens = WordTokenizer(), max_tokens
        self.language_backbone = nn.ModuleDict(dict(body=_Body(self.tokenizer.words, width, depth, heads)))
        self.language_backbone.body = self.language_backbone['body']

    def forward(self, captions: list[str], **kwargs) -> dict:
        """Return embeddings and masks of captions, by the keys of ``BertModel``."""
        body = self.language_backbone['body']
        tokens = self.tokenizer(list(captions), max_length=self.max_tokens).to(body.embedding.weight.device)
        masks, positions = generate_masks_with_special_tokens_and_transfer_map(tokens, self.tokenizer.special)
        embedded = body(tokens.input_ids, masks)
        return dict(
            embedded=embedded,
            masks=masks,
            hidden=embedded,
            position_ids=positions,
            text_token_mask=tokens.attention_mask.bool(),
        )
