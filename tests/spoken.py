"""Nets for the tests of likelihoods: small ones of each family, and one whose probabilities are known by heart."""

import math

import torch

import models
from lmzoo.tokenizer import byte, train_bpe

TEXT = "the cat sat on a mat and then it saw one dog run over old hills while rain fell".split()


def net(kind, tokenizer=None, max_len=32, **words):
    """A random net that reads bytes."""
    tokenizer = tokenizer or byte([], 400)
    made = models.make(kind, vocab_size=len(tokenizer), max_len=max_len, **words)
    made.tokenizer = tokenizer
    return made


def bpe(vocab_size=290):
    return train_bpe([" ".join(TEXT)] * 5, vocab_size)


class Unigram(torch.nn.Module):
    """A net of any family for which each byte has a probability of its own, wherever it stands: 2^-n for the n-th of
    `signs` (n from 1), and next to none for all others."""

    def __init__(self, signs, family="decoder", max_len=64):
        super().__init__()
        self.tokenizer, self.family, self.max_len, self.max_positions = byte([], 400), family, max_len, None
        self.head = torch.nn.Linear(1, len(self.tokenizer))
        logits = torch.full((len(self.tokenizer),), -100.0)
        for n, sign in enumerate(signs, 1):
            logits[self.tokenizer.encode(sign)] = -n * math.log(2)
        self.head.weight = torch.nn.Parameter(torch.zeros(len(self.tokenizer), 1))
        self.head.bias = torch.nn.Parameter(logits)

    def forward(self, ids, mask=None, decoder_ids=None, decoder_mask=None, readout=None):
        rows = ids if decoder_ids is None else decoder_ids
        return readout(self.head, torch.zeros(*rows.shape, 1))
