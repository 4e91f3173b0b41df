"""Models to train: what a config can name, and the few things that the trainer asks of any of them.

kinds        config classes, no torch
decoder      lowtide's own model
huggingface  any causal language model of transformers, offline
forward      tokens to logits, and how many tokens a model knows, whatever its class
flops        model FLOPs per token
"""
