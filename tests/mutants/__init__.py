"""Mutants: the tests of the tests. The core with one rule broken, which some test has to notice.

python -m tests.mutants --jobs 2              all mutants; survivors are shown, and fail
python -m tests.mutants --only recovery       those of one module
python -m tests.mutants --sample 40           every n-th, always the same ones
"""
