"""What a user asks for, and where that was said."""
