//! MPI.
