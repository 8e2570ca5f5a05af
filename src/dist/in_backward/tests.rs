//! Optimizers in backward over ranks that are threads.
