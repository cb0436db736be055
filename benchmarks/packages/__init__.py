"""MoE layers of other packages, unmodified, on two ranks: found, rewritten, right?"""
