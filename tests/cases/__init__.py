"""Case scripts: small trainings that do what real scripts do, run undisturbed and disturbed, and compared."""
