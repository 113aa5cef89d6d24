"""Rules: an event makes a new state, and a state makes orders. Imports all other rooms."""
