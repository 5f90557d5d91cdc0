"""Rules of products of matrices, convolutions and linear algebra."""
