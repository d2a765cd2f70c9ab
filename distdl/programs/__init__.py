"""What ``python -m distdl`` starts: ranks, a demo, a benchmark of single operators; and data sets of which each rank
reads its part."""
