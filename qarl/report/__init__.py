"""Pages and plots: one self-contained HTML file for a run or a comparison, and the same charts as PNG."""
