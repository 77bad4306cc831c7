"""foresight: choices by the predicted end of every transfer."""
