"""What the coordinator knows of what has happened: it watches, keeps and tells, and changes nothing."""
