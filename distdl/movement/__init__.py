"""The movements: each is one block, its rule (layouts in, a cached :class:`LinearMap` out) above its function.

*Read call.py first, then blocks.py*; users find the rules in :mod:`distdl.maps`, the functions in
:mod:`distdl.functional`.
"""
