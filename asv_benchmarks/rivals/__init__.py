"""What `rivals.py` runs, a part a module. Nothing here imports a rival until it is measured."""
