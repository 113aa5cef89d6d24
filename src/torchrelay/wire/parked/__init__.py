"""Parked jobs: the folder of a job's parkings, and the manifest of one."""
