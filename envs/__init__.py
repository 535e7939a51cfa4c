"""Where things happen: Gymnasium environments and cost functions. No learning code, no Ray."""
