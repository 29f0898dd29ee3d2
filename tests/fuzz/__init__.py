"""What tests/test_fuzz.py draws calls from: tensors of any layout, foreign objects, and what is wrong with a call."""
