"""Loops that the doctor has to tell apart, written by people who had not read its rules: `python -m benchmarks.doctor_zoo`."""
