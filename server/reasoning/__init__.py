"""A model's reasoning: where it begins and ends, in the text and in the grammar."""
