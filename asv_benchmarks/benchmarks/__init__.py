"""Benchmarks that asv runs; rivals stand outside, since asv imports every module here."""
