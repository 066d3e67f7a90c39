"""Small helpers without a room of their own: processes, threads, signals, text, names of packed layers."""
