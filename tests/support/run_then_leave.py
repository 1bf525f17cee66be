"""Runs the Python program that is the first argument, with the other arguments, and exits without
finalising the interpreter. Gloo's threads may still request the interpreter after a DistributedDataParallel job; a
request during finalisation aborts the process ("terminate called without an active exception")."""

import os
import runpy
import sys

sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
