"""The protocol: what is named, heard, decided and ordered. Pure: no clock, socket, thread, file or torch."""
