"""The paper's algorithms: local training of a client, aggregation at the server, and the loop over rounds."""
