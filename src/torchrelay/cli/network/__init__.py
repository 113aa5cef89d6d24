"""The verb of the network part."""
