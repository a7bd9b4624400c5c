"""What is installed on a machine, what of it works, and which command mends what does not: for scripts/doctor.py."""
