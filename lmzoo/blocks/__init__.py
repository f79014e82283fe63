"""The parts that every family is made of; they import torch and nothing else.

Letters for shapes, used in every docstring below:

    B  rows of the batch        D  d_model, width of the model      F  d_ff, inner width of the feed-forward
    T  queries of a row         H  attention heads                  V  vocabulary
    S  keys of a row            K  d_head, width of a head          N  any number of positions taken out of rows

Parts of one kind are called alike, so that any of them fits any model:

    position(d_model, n_heads, d_head, max_len, causal)     attention(d_model, n_heads, n_kv_heads, d_head, dropout)
    ffn(d_model, d_ff, dropout)                             cross(the same, and d_memory)
    norm(d_model)                                           embed(vocab_size, d_model, dropout)
    block(attn, ffn, norm, dropout, cross)                  head(embed)          init(model)

A position's hooks: embed(x, positions), turn(positions), rotate(q, k, turn), bias(q_positions, k_positions).
"""
