"""What tests share: stands, scripts that are driven, worlds. No test is here."""
