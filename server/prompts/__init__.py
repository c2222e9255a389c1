"""How a call's prompt becomes token ids: values into text, text into tokens of one model."""
