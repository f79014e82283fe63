"""What one forward knows of its rows: who is kept, which document, which position, who may see whom.

Nothing else builds masks. Two documents of 3 and 2 tokens in a causal row, then one column of padding (x: sees):

        a0 a1 a2 b0 b1  .
    a0   x
    a1   x  x
    a2   x  x  x
    b0            x
    b1            x  x
     .   x  x  x  x  x  x      a row that would see nothing sees everything, so that its numbers stay finite
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import reduce
from operator import and_

import torch
from torch import Tensor

from .cache import ring_columns


def count_positions(keep: Tensor | None, documents: Tensor | None) -> Tensor:
    """Positions (B, T): how many kept tokens of its own document stand before each token.

    keep (B, T) bool, documents (B, T) int; one of the two may be None. Padding on the left, padding on the right and
    packing therefore all give a document the positions that it has alone.
    """
    kept = torch.ones_like(documents, dtype=torch.long) if keep is None else keep.long()
    before = kept.cumsum(1) - kept
    if documents is None:
        return before
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return before - torch.where(starts, before, 0).cummax(1).values


@dataclass
class Layout:
    """The facts of one attention: T queries against S keys. Lowered once per kind of layer, reused by all layers.

    q_positions (B or 1, T), k_positions (B or 1, S); keep (B, S) bool; q_documents (B, T), k_documents (B, S).
    Under ``causal`` query t stands in column ``offset + t`` of the keys; ``cached``: the keys are those of a cache.
    """

    q_positions: Tensor
    k_positions: Tensor
    causal: bool = False
    offset: int = 0
    keep: Tensor | None = None
    q_documents: Tensor | None = None
    k_documents: Tensor | None = None
    cached: bool = False
    lowered: dict = field(default_factory=dict, repr=False)
    rings: dict = field(default_factory=dict, repr=False)
    turns: dict = field(default_factory=dict, repr=False)  # of queries, by the id of their position scheme

    @classmethod
    def of(cls, tokens: Tensor, attention_mask: Tensor | None, document_ids: Tensor | None, causal: bool, cache=None):
        """The layout of self-attention over ``tokens`` (B, T, ...), behind what the cache already holds."""
        offset, (batch, length) = 0 if cache is None else cache.length, tokens.shape[:2]
        keep = None if attention_mask is None else attention_mask.bool()
        if cache is not None:
            keep, document_ids = cache.extend(batch, length, keep, document_ids)
        if keep is None and document_ids is None:
            positions = torch.arange(offset + length, device=tokens.device)[None]
        else:
            positions = count_positions(keep, document_ids)
        new = slice(offset, None)
        return cls(positions[:, new], positions, causal, offset, keep,
                   None if document_ids is None else document_ids[:, new], document_ids, cache is not None)  # fmt: skip

    def within(self, window: int | None) -> Layout:
        """The layout for a layer with this window: over fewer keys, where its ring has let go of some."""
        n_keys = self.k_positions.shape[1]
        if not self.cached or window is None or n_keys <= window:
            return self
        if window not in self.rings:
            columns = ring_columns(window, self.offset, n_keys, self.k_positions.device)
            self.rings[window] = replace(
                self,
                k_positions=self.k_positions[:, columns],
                keep=None if self.keep is None else self.keep[:, columns],
                k_documents=None if self.k_documents is None else self.k_documents[:, columns],
                offset=min(self.offset, window - 1),
                cached=False,
                lowered={},
            )
        return self.rings[window]

    def over(self, memory: Tensor, memory_mask: Tensor | None, memory_documents: Tensor | None = None) -> Layout:
        """The layout of cross-attention from these queries to ``memory`` (B, S, D)."""
        return Layout(
            q_positions=self.q_positions,
            k_positions=torch.arange(memory.shape[1], device=memory.device)[None],
            keep=None if memory_mask is None else memory_mask.bool(),
            q_documents=None if memory_documents is None else self.q_documents,
            k_documents=None if self.q_documents is None else memory_documents,
        )

    def _sees(self, window: int | None, q_column, k_column, query, key) -> Tensor | None:
        """Who sees whom, None for everyone everyone; ``query`` and ``key`` pick what a fact (B or 1, T or S) says."""
        rules = []
        if self.causal and self.q_positions.shape[1] > 1:
            rules.append(q_column >= k_column)
        if window is not None:
            distance = query(self.q_positions) - key(self.k_positions)
            rules.append(distance < window if self.causal else distance.abs() <= window // 2)
        if self.keep is not None:
            rules.append(key(self.keep))
        if self.k_documents is not None:
            rules.append(query(self.q_documents) == key(self.k_documents))
        return reduce(and_, rules) if rules else None

    def allowed(self, window: int | None = None) -> Tensor | None:
        """Who sees whom, (B or 1, 1, T or 1, S) bool; None when everyone sees everyone."""
        columns = torch.arange(self.k_positions.shape[1], device=self.k_positions.device)[None, None]
        q_columns = columns[:, :, self.offset :].mT  # as many as queries where the rule of time is asked
        allowed = self._sees(window, q_columns, columns, lambda fact: fact[:, :, None], lambda fact: fact[:, None])
        if self.keep is not None or self.k_documents is not None:
            allowed = allowed | ~allowed.any(-1, keepdim=True)
        return None if allowed is None else allowed[:, None]

    def blocks(self, window: int | None):
        """Who sees whom as a BlockMask of FlexAttention, which passes over blocks of pairs that do not see each other.

        A row that would see nothing is given zeros by it.
        """
        from torch.nn.attention.flex_attention import create_block_mask  # slow to import, and seldom wanted

        facts = (self.q_positions, self.k_positions, self.keep, self.q_documents, self.k_documents)
        batch = max(len(fact) for fact in facts if fact is not None)

        def sees(row, head, query, key):
            def says(fact: Tensor, column: Tensor) -> Tensor:
                return fact.expand(batch, -1)[row, column]

            return self._sees(
                window, query + self.offset, key, lambda fact: says(fact, query), lambda fact: says(fact, key)
            )

        n_queries, n_keys = self.q_positions.shape[1], self.k_positions.shape[1]
        return create_block_mask(sees, batch, None, n_queries, n_keys, device=self.k_positions.device)

    def narrows(self, window: int | None) -> int | None:
        """This window, or None where no query has a key beyond it (a program for any length has to look)."""
        if torch.compiler.is_exporting():
            return window
        n_keys = self.k_positions.shape[1]
        return None if window is None or n_keys <= (window if self.causal else window // 2 + 1) else window

    def lower(self, position, window: int | None, dtype: torch.dtype, dense: bool, blocks: bool = False) -> tuple:
        """What an attention kernel takes: (mask, is_causal).

        The mask is None, bool (True: seen), or a float that is added to the scores, -inf where nothing is seen: always
        float when the position scheme has a bias or when the kernel asks for ``dense``, which also rules out is_causal.
        With ``blocks`` it is a BlockMask where a window or documents leave much unseen and no bias is added.
        """
        key = (id(position), window, dtype, dense, blocks)
        if key not in self.lowered:
            self.lowered[key] = self._lower(position, window, dtype, dense, blocks)
        return self.lowered[key]

    def _lower(self, position, window, dtype, dense, blocks):
        bias = None if position is None else position.bias(self.q_positions, self.k_positions)
        n_queries, n_keys, window = self.q_positions.shape[1], self.k_positions.shape[1], self.narrows(window)
        special = bias is not None or window is not None or self.keep is not None or self.k_documents is not None
        if self.causal and not special and not dense and 1 < n_queries == n_keys:
            return None, True
        if blocks and bias is None and n_queries > 1 and not self.cached and (window or self.k_documents is not None):
            return self.blocks(window), False
        allowed = self.allowed(window)
        if bias is None and (allowed is None or not dense):
            return allowed, False
        if bias is None:
            bias = torch.zeros((), dtype=dtype, device=allowed.device)
        mask = bias if allowed is None else torch.where(allowed, bias, -torch.inf)
        return mask.to(dtype, memory_format=torch.contiguous_format), False  # a table looked up is not: slow to add
