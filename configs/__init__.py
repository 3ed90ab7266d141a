"""What was asked: the settings tree and the shipped YAML files."""
