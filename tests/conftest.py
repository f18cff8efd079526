"""For all tests."""

import signal

# Started in a script's background, a process ignores Ctrl-C, and so do all that it starts. Tests that
# interrupt something must not depend on how they were started themselves.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
