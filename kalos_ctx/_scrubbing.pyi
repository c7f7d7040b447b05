# Called from compiled code alone: nothing here is seen from Python.
