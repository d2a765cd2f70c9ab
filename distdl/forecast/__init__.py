"""A program before it runs: its movements on ranks that are not there, what they would cost, and which partition would
be cheapest. :mod:`trace` is the way in."""
