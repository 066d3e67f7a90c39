"""The one exception for faults a user can cause and can fix."""

from __future__ import annotations


class UserError(Exception):
    """A fault in what the user gave. The message is one line: the place, the offending value, the fix.

    `qarl` prints it without a traceback and exits with code 2.
    """
