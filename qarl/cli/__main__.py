"""`python -m qarl.cli` is the same as `qarl`."""

from qarl.cli import main

main()
