"""Tests of one module or a few, in milliseconds: `make quick`. A folder for each package."""
