"""Where batches come from: real text that every Python brings along, and random numbers.

    kinds          config classes, no torch
    corpus         the text, as bytes, split into training and held-out parts; no torch
    embedded_text  its windows in a shuffled order that does not depend on the number of ranks
    random_data    batches of given shapes, types and ranges

A data source is what the loop sees: ``batches(start_step)``, ``batches_from(sample)``,
``evaluation_batches()``, ``batch_size`` (per rank), ``vocab_size``. Batches are pairs (inputs, targets) on
the CPU.
"""
