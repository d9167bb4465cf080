"""Training and its results: the run and its folder, predictions, ONNX files, scikit-learn estimators."""
