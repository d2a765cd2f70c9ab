"""``python -m distdl bench``: single operators on your own shapes, timed in pairs with a copy of the bytes they touch.

``timing``: how samples are taken; ``table``: what is made of them; ``cases``: the operators. The repository's suite
(``bench/``) adds peers to the same cases.
"""
