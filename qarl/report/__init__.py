"""HTML pages and plots: one self-contained file for a run or a comparison, and the same charts as PNG."""
