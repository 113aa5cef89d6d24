"""The worker: what runs in each training process, beside and underneath the script."""
