"""What `sdsage bench` measures: attention alone, and whole generations."""
