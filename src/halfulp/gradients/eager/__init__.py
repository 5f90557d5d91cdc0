"""The eager front end: a forward pass in which every gradient-carrying tensor gets a site."""
