"""Writers of the generated blocks in the documents. Run them as `python -m benchmarks.NAME FIGURES`."""
