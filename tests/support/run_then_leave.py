"""Runs the Python program that is named first, with the other arguments, and leaves without ending
the interpreter: Gloo's threads may still ask for it after a DistributedDataParallel job, and one
that asks while it ends aborts the process ("terminate called without an active exception")."""

import os
import runpy
import sys

sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
