"""Scripts as users write them, and a demonstration of what happens to them."""
