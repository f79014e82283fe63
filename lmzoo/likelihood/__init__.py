"""What a net makes of text that it is given: the likelihood of its tokens, and what can be told from that.

    scoring              rows of tokens become log-probabilities, in batches
    pairs                the log-likelihood of a text after another, for each family
    measuring            what a measure is given by a configuration
    questions            JSON lines, and the likelihoods of all answers to a question
    sliding_window, pseudo_perplexity, multiple_choice, labels, minimal_pairs     the measures (conf/measure/)
    harness              the nets of lmzoo as models of EleutherAI's lm-eval

A measure is a class that is called with a net and text, and returns {metric: value}, and as a whole number how much it
has measured, {"tokens": n}. `reads` says which text: "documents" (a split of a token store), "records" (paths of JSON
lines) or "labelled" (see `labels.Labelled`). `families` names the families of nets that it is for, and `check(net)`,
where it has one, refuses what it cannot do with a net before any text is read.
"""
