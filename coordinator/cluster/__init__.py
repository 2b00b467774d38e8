"""Who is here, what they were told to do, and the streams to them."""
