"""`python -m qarl.cli`: the same as `qarl`."""

from qarl.cli import main

main()
