"""Where windows are built in these tests: on the CPU, like the models that they are given to."""

import os

os.environ["KALOS_DEVICE"] = "cpu"
