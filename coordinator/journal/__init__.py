"""What a coordinator must not forget when its process ends."""
