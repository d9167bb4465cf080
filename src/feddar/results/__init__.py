"""What training leaves: the run and its folder, predictions, ONNX files, scikit-learn estimators."""
