"""Wrong input of every kind, made by rule: what each reader and parser promises about it."""
