"""Every MoE family of the installed transformers, tiny, on two ranks: found, rewritten, right?"""
