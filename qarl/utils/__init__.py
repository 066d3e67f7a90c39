"""Small helpers: processes, threads, signals, text, versions, names of packed layers."""
