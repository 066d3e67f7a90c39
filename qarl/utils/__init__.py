"""Small helpers: processes, threads, signals, text, names of packed layers."""
