"""The `qarl` command line on ranks that run some Python first:  python ranks_with.py FILE train --nproc 2 CONFIG"""

import sys

if __name__ == "__main__":
    from qarl.cli import launch, main

    first = f"exec(compile(open({sys.argv[1]!r}).read(), {sys.argv[1]!r}, 'exec'), {{}}); "
    launch._BOOT = launch._BOOT.replace("from qarl", f"{first}from qarl", 1)
    main(sys.argv[2:])
